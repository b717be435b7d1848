"""Loading of a Hugging Face tokenizer.json: run by tiktoken if that is equivalent, else by the `tokenizers` library.

The format is the serialization of the `tokenizers` library.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import normalizers

from model.tokenizer.added_tokens import AddedToken, Normalize, Preparation
from model.tokenizer.alphabet import BYTE_OF, to_bytes
from model.tokenizer.bos_eos import TokenizerConfig, begin_mark, end_marks
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.decoders import TokenDecoder, read_decoder
from model.tokenizer.hugging_face import LibraryTokenizer
from model.tokenizer.interface import Tokenizer, TokenizerError
from model.tokenizer.merges import NotEquivalentError, canonical_merges, is_joined_by_ranks
from model.tokenizer.split_pattern import GPT2_PATTERN, is_portable
from model.tokenizer.token_length_bound import is_bounded

TOKENIZER_FILE = "tokenizer.json"
_MODELS = ("BPE", "WordLevel", "Unigram")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Marks:
    """See `ByteLevelTokenizer`."""

    special_tokens: dict[str, int]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def tokenizer_from_json(
    directory: Path, values: dict[str, Any], config: TokenizerConfig, *, file: str = TOKENIZER_FILE
) -> Tokenizer:
    """Make the tokenizer that a tokenizer.json and the other files of its directory describe.

    Args:
        values: the object of the tokenizer.json.
        config: the settings of tokenizer_config.json and special_tokens_map.json.
        file: name of the file that `values` comes from, for error messages.

    Raises:
        TokenizerError: a part of a file is malformed or not supported.
    """
    with naming(file):
        decoder, added = read_decoder(values.get("decoder")), _added_tokens(values, config)
        vocabulary = {**_vocabulary(values["model"]), **{token.content: token.id for token in added}}
        special = {token.content: token.id for token in added if token.special}
        special |= {name: vocabulary[name] for name in config.special if name in vocabulary}
        bos_token_id = begin_mark(config, values.get("post_processor"), vocabulary)
        if bos_token_id is not None:
            special |= {name: token_id for name, token_id in vocabulary.items() if token_id == bos_token_id}
    marks = _Marks(
        special_tokens=special,
        eos_token_ids=end_marks(directory, config, vocabulary),
        bos_token_id=bos_token_id,
    )
    with naming(file):
        try:
            return _byte_level(values, decoder, added, marks)
        except NotEquivalentError:
            return LibraryTokenizer(
                json.dumps(with_all_added_tokens(values, config)),
                decoder=decoder,
                special_tokens=marks.special_tokens,
                eos_token_ids=marks.eos_token_ids,
                bos_token_id=marks.bos_token_id,
                added_tokens=added,
                alphabet=_alphabet(values["model"]),
                is_bounded=is_bounded(values, decoder, added),
            )


@contextmanager
def naming(file: str) -> Iterator[None]:
    """Put the file name before the message of a TokenizerError, and turn errors of malformed content into one."""
    try:
        yield
    except TokenizerError as error:
        raise TokenizerError(f"{file}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TokenizerError(f"{file}: malformed: {error!r}; copy the file again") from error


def _vocabulary(model: Mapping[str, Any]) -> dict[str, int]:
    kind = model.get("type", "BPE")
    if kind not in _MODELS:
        raise TokenizerError(f"the model type {kind!r} is not supported; use one of {', '.join(_MODELS)}")
    if prefix := model.get("continuing_subword_prefix"):
        raise TokenizerError(f"the continuing_subword_prefix {prefix!r} is not supported; use a tokenizer without it")
    if kind == "Unigram":
        return {token: index for index, (token, _) in enumerate(model["vocab"])}
    vocabulary: dict[str, int] = model["vocab"]
    if not vocabulary or not all(isinstance(token_id, int) and token_id >= 0 for token_id in vocabulary.values()):
        raise TokenizerError("the vocabulary is empty, or has ids other than integers from 0; copy the file again")
    return vocabulary


def _added_tokens(values: Mapping[str, Any], config: TokenizerConfig) -> list[AddedToken]:
    """Return the added tokens of both tokenizer.json and tokenizer_config.json, sorted by id.

    tokenizer.json has precedence. Tokens that the config names as special tokens become special.
    """
    tokens = {token.id: token for token in map(AddedToken.from_dict, values.get("added_tokens", []))}
    for token_id, entry in config.added_tokens.items():
        tokens.setdefault(token_id, AddedToken.from_dict(entry, token_id=token_id))
    named = [replace(t, special=True) if t.content in config.special else t for t in tokens.values()]
    return sorted(named, key=lambda token: token.id)


def with_all_added_tokens(values: Mapping[str, Any], config: TokenizerConfig) -> dict[str, Any]:
    """Return the object of a tokenizer.json, extended by the added tokens that are only in tokenizer_config.json."""
    return {**values, "added_tokens": [_described(token, values) for token in _added_tokens(values, config)]}


def _alphabet(model: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the characters that have tokens, if the library drops or rejects all other characters, else None.

    For a BPE model, these are the characters that merging begins with. For a WordLevel model of single characters,
    they are its whole vocabulary.
    """
    if model.get("type") == "WordLevel" and model.get("unk_token") not in model["vocab"]:
        return frozenset(model["vocab"]) if all(len(token) == 1 for token in model["vocab"]) else None
    if model.get("type", "BPE") != "BPE" or model.get("unk_token") is not None or model.get("byte_fallback"):
        return None
    return frozenset(token for token in model["vocab"] if len(token) == 1)


def _described(token: AddedToken, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of an added token in the form that the library reads."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": token.normalized}
    entries = {entry["id"]: entry for entry in values.get("added_tokens", [])}
    return {**plain, **entries.get(token.id, {}), "id": token.id, "content": token.content, "special": token.special}


def _byte_level(
    values: Mapping[str, Any], decoder: TokenDecoder, added: Sequence[AddedToken], marks: _Marks
) -> ByteLevelTokenizer:
    """Make a tiktoken-based tokenizer from a tokenizer.json.

    Raises:
        NotEquivalentError: tiktoken might return other tokens than the library.
    """
    model = values["model"]
    if model.get("type", "BPE") != "BPE" or not decoder.byte_level or any(model.get(key) for key in _UNUSUAL):
        raise NotEquivalentError("not a plain byte-level BPE")
    if any(token.trimmed for token in added):
        raise NotEquivalentError("an added token depends on adjacent text")
    pattern, add_prefix_space = _pattern(values.get("pre_tokenizer"))
    preparation = Preparation(
        added_tokens=tuple(added), normalize=_normalize(values.get("normalizer")), add_prefix_space=add_prefix_space
    )
    special_ids = set(marks.special_tokens.values())
    vocabulary: dict[str, int] = model["vocab"]
    tokens = _ranked(vocabulary, model, special_ids)
    ids = [vocabulary[token] for token in tokens]
    by_id = ids[256:] == sorted(ids[256:])
    normalize = preparation.normalize
    others = {t.id: _text_of(normalize(t.content) if normalize and t.normalized else t.content) for t in added} | {
        vocabulary[token]: _text_of(token) for token in vocabulary.keys() - set(tokens)
    }
    return ByteLevelTokenizer(
        pattern=pattern,
        ranks={
            _text_of(token): token_id if by_id else rank
            for rank, (token, token_id) in enumerate(zip(tokens, ids, strict=True))
        },
        special_tokens=marks.special_tokens,
        eos_token_ids=marks.eos_token_ids,
        bos_token_id=marks.bos_token_id,
        ids=None if by_id else ids,
        others={token_id: others[token_id] for token_id in others.keys() - special_ids - set(ids)},
        preparation=preparation,
    )


def _ranked(vocabulary: Mapping[str, int], model: Mapping[str, Any], special_ids: set[int]) -> list[str]:
    """Return the tokens in tiktoken's rank order: single bytes, then merged tokens, then tokens never merged."""
    merges = canonical_merges(vocabulary, map(_pair, model["merges"]))
    if any(vocabulary[token] in special_ids for token in merges.tokens):
        raise NotEquivalentError("text can be merged into a special token")
    tokens = [*BYTE_OF, *merges.tokens]
    if not model.get("ignore_merges"):
        return tokens
    whole = [t for t in merges.whole_pieces if vocabulary[t] not in special_ids and to_bytes(t) is not None]
    ranks = {_text_of(token): rank for rank, token in enumerate(tokens)} if whole else {}
    if any(is_joined_by_ranks(ranks, _text_of(token)) for token in whole):
        raise NotEquivalentError("tiktoken would merge a token that the library never merges")
    return [*tokens, *sorted(whole, key=vocabulary.__getitem__)]


def _pair(merge: str | list[str]) -> tuple[str, str]:
    """Return the two parts of a merge. Files from before 2024 have one string with a space between the parts."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _text_of(token: str) -> bytes:
    found = to_bytes(token)
    return token.encode("utf-8", "replace") if found is None else found


def _pattern(pre_tokenizer: Mapping[str, Any] | None) -> tuple[str, bool]:
    """Return the split pattern of a pre-tokenizer, and True if the pre-tokenizer puts a space before a text."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": bool(add_prefix_space), **rest}:
            if rest.get("use_regex", True) is True:
                return GPT2_PATTERN, add_prefix_space
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": behavior, "invert": invert},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            if (behavior, invert) in (("Isolated", False), ("Removed", True)) and is_portable(pattern):
                return pattern, False
    raise NotEquivalentError("the pre_tokenizer has no equivalent in tiktoken")


def _normalize(normalizer: Mapping[str, Any] | None) -> Normalize | None:
    steps = [] if normalizer is None else [normalizer]
    if normalizer is not None and normalizer.get("type") == "Sequence":
        steps = normalizer["normalizers"]
    if not steps:
        return None
    if any(step != {"type": "NFC"} for step in steps):
        raise NotEquivalentError("the normalizer is not NFC")
    return _normalize_to_nfc


def _normalize_to_nfc(text: str) -> str:
    # The library's NFC, because Python's may implement another version of Unicode.
    return text if text.isascii() else str(_NFC.normalize_str(text))


_NFC = normalizers.NFC()
_UNUSUAL = ("dropout", "end_of_word_suffix", "byte_fallback")
