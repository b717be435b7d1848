"""Tokenizers of the Hugging Face `tokenizers` library, described by a tokenizer.json. Torch-free.

The library encodes. Decoding is implemented here, because the library's decoding cannot be streamed. Here, a token
adds the same bytes to a text, whatever its neighbours are.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from model.tokenizer.bos_eos import TokenizerConfig, read_bos_token_id, read_eos_token_ids
from model.tokenizer.decoders import CHARACTER_OF_BYTE, TokenDecoder, flatten_steps, read_decoder, to_characters
from model.tokenizer.interface import Tokenizer, TokenizerError, naming

TOKENIZER_FILE = "tokenizer.json"
# NFC leaves at least a quarter of a text's bytes. The worst case known: U+0390 has 2 bytes, and its longest spelling
# (U+1FBE U+0308 U+0301) has 7.
NFC_SHRINKS = 4
_MODELS = ("BPE", "WordLevel", "Unigram")
_MAX_REASON_LENGTH = 200
_MAX_CHARACTER_BYTES = 4
BYTE_LEVEL_DECODER = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_PLAIN_ADDED_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def tokenizer_from_json(
    directory: Path, values: dict[str, Any], config: TokenizerConfig, *, file: str = TOKENIZER_FILE
) -> "LibraryTokenizer":
    """Make the tokenizer that a tokenizer.json and the other files of its directory describe.

    Args:
        values: the object of the tokenizer.json.
        config: the settings of tokenizer_config.json and special_tokens_map.json.
        file: name of the file that `values` comes from, for error messages.

    Raises:
        TokenizerError: a part of a file is malformed or not supported.
    """
    with naming(file):
        decoder, vocabulary = read_decoder(values.get("decoder")), _read_vocabulary(values["model"])
        added_tokens = _read_added_tokens(values, config, vocabulary)
        vocabulary |= {token["content"]: token["id"] for token in added_tokens}
        special = {token["content"]: token["id"] for token in added_tokens if token["special"]}
        bos_token_id = read_bos_token_id(config, values.get("post_processor"), vocabulary)
        if bos_token_id is not None:
            special |= {name: token_id for name, token_id in vocabulary.items() if token_id == bos_token_id}
    eos_token_ids = read_eos_token_ids(directory, config, vocabulary)
    with naming(file):
        return LibraryTokenizer(
            {**values, "added_tokens": added_tokens},
            decoder=decoder,
            special_tokens=special,
            eos_token_ids=eos_token_ids,
            bos_token_id=bos_token_id,
        )


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    Args:
        values: the object of a tokenizer.json, with all added tokens.
        decoder: the decoder that the file describes.
        special_tokens: name and id of each special token.
        eos_token_ids, bos_token_id: the EOS tokens, and the BOS token if there is one.

    Raises:
        TokenizerError: the library rejects the file or would assign another id to a token, an added token normalizes
            to nothing, or an id is wrong; see `Tokenizer`.
    """

    def __init__(
        self,
        values: dict[str, Any],
        *,
        decoder: TokenDecoder,
        special_tokens: dict[str, int],
        eos_token_ids: tuple[int, ...],
        bos_token_id: int | None,
    ) -> None:
        self._library = _guarded(lambda: tokenizers.Tokenizer.from_str(json.dumps(values)))
        self._library.encode_special_tokens = True  # names of special tokens in a text are text
        self._library.no_truncation()
        self._library.no_padding()
        self._check_added_tokens(values["added_tokens"])
        self._decoder = decoder
        self._alphabet = _alphabet(values["model"], decoder)
        ordinary = set(self._library.get_vocab(with_added_tokens=True).values()) - set(special_tokens.values())
        # The vocabulary key is not the token's text: a normalized added token stands for its normalized text.
        token_bytes = ((i, decoder.token_bytes(self._library.id_to_token(i))) for i in ordinary)
        super().__init__(token_bytes, special_tokens, eos_token_ids=eos_token_ids, bos_token_id=bos_token_id)
        self.longest_token = _max_covered_bytes(values, decoder, max(map(len, self._token_bytes)))

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """See `Tokenizer`.

        Raises:
            TokenizerError: the library cannot encode the text, for example a character without a token.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if self._alphabet is not None:
            self._check_nothing_is_dropped(text, self._alphabet)
        library = self._special_parser if parse_special else self._library
        token_ids: list[int] = _guarded(lambda: library.encode(text, add_special_tokens=False)).ids
        return token_ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """See `Tokenizer`. Remove the space that such tokenizers put before a text."""
        return self._decoder.strip_start(self._joined_bytes(token_ids)).decode("utf-8", "replace")

    def to_json(self) -> str:
        """Return the tokenizer.json that the library writes."""
        return str(self._library.to_str())

    @cached_property
    def _special_parser(self) -> tokenizers.Tokenizer:
        """A second library tokenizer, which parses special tokens in a text.

        Threads share both tokenizers, so the setting of one tokenizer cannot be switched per call.
        """
        library = tokenizers.Tokenizer.from_str(self.to_json())
        library.encode_special_tokens = False
        return library

    def _check_added_tokens(self, added_tokens: Sequence[Mapping[str, Any]]) -> None:
        """Raise TokenizerError for an added token that the library would handle differently from the file.

        The library ignores the ids in the file for tokens outside the vocabulary and numbers them in file order. It
        matches a token with empty normalized text everywhere.
        """
        for token in added_tokens:
            if (actual := self._library.token_to_id(token["content"])) != token["id"]:
                raise TokenizerError(
                    f"the added token {token['content']!r} has the id {token['id']}, but the tokenizers library "
                    f"assigns {actual}, because lower ids are missing; add a token for each missing id"
                )
            if token["normalized"] and not self._normalize(token["content"]):
                raise TokenizerError(
                    f"the added token {token['content']!r} is empty after normalization; set its normalized to false"
                )

    def _check_nothing_is_dropped(self, text: str, alphabet: frozenset[str]) -> None:
        for character in dict.fromkeys(self._normalize(text)):
            symbols = to_characters(character.encode()) if self._decoder.byte_level else character
            if not alphabet.issuperset(symbols) and (self._decoder.byte_level or not character.isspace()):
                raise TokenizerError(f"the tokenizer has no token for {character!r}; remove this character")

    def _normalize(self, text: str) -> str:
        normalizer = self._library.normalizer
        return text if normalizer is None else str(_guarded(lambda: normalizer.normalize_str(text)))


def added_token(content: str, token_id: int) -> dict[str, Any]:
    """Return an entry of `added_tokens` for a special token."""
    return {**_PLAIN_ADDED_TOKEN, "id": token_id, "content": content}


def pre_tokenizer_for(pattern: str) -> dict[str, Any]:
    """Return the `pre_tokenizer` of a tokenizer.json that splits by a pattern and writes bytes as characters."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


def _read_vocabulary(model: Mapping[str, Any]) -> dict[str, int]:
    kind = model.get("type", "BPE")
    if kind not in _MODELS:
        raise TokenizerError(f"the model type {kind!r} is not supported; use one of {', '.join(_MODELS)}")
    if prefix := model.get("continuing_subword_prefix"):
        raise TokenizerError(f"the continuing_subword_prefix {prefix!r} is not supported; use a tokenizer without it")
    if kind == "Unigram":
        return {token: index for index, (token, _) in enumerate(model["vocab"])}
    vocabulary: dict[str, int] = dict(model["vocab"])
    if not vocabulary or not all(isinstance(token_id, int) and token_id >= 0 for token_id in vocabulary.values()):
        raise TokenizerError("the vocabulary is empty, or has ids other than integers from 0; copy the file again")
    [(token_id, count)] = Counter(vocabulary.values()).most_common(1)
    if count > 1:
        raise TokenizerError(f"token ids must be unique; {token_id} is not; copy the file again")
    return vocabulary


def _read_added_tokens(
    values: Mapping[str, Any], config: TokenizerConfig, vocabulary: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the added tokens of tokenizer.json and tokenizer_config.json, sorted by id.

    tokenizer.json has precedence. Tokens that the config names as special tokens become special.
    """
    by_id = {vocabulary[name]: added_token(name, vocabulary[name]) for name in config.special & vocabulary.keys()}
    listed = [{"id": token_id, **entry} for token_id, entry in config.added_tokens.items()]
    for entry in (*listed, *values.get("added_tokens", [])):
        token_id, content = entry.get("id"), entry.get("content")
        if not isinstance(token_id, int) or token_id < 0 or not isinstance(content, str) or not content:
            raise TokenizerError(f"an added token needs an id and a content, not {entry!r}; correct it")
        is_special = entry.get("special") is True or content in config.special
        normalized = entry.get("normalized", entry.get("special") is not True)
        by_id[token_id] = {**_PLAIN_ADDED_TOKEN, **entry, "normalized": normalized, "special": is_special}
    return [by_id[token_id] for token_id in sorted(by_id)]


def _alphabet(model: Mapping[str, Any], decoder: TokenDecoder) -> frozenset[str] | None:
    """Return the characters that have tokens, if the library drops or rejects all other characters, else None.

    For a BPE model, these are the characters that merging begins with. For a WordLevel model of single characters,
    they are its whole vocabulary.
    """
    vocabulary, unknown = model["vocab"], model.get("unk_token")
    if model.get("type") == "WordLevel" and unknown not in vocabulary:
        return frozenset(vocabulary) if all(len(token) == 1 for token in vocabulary) else None
    if model.get("type", "BPE") != "BPE" or unknown is not None or model.get("byte_fallback"):
        return None
    alphabet = frozenset(token for token in vocabulary if len(token) == 1)
    return None if decoder.byte_level and alphabet.issuperset(CHARACTER_OF_BYTE.values()) else alphabet


def _max_covered_bytes(values: Mapping[str, Any], decoder: TokenDecoder, longest_token: int) -> int | None:
    """Return the maximum number of text bytes that one token covers; None if there is no limit.

    A text far longer than the context is rejected by this limit before the slow tokenization. There is no limit if one
    token can cover a run of any length: unknown characters fused into one token, words outside the vocabulary, spaces
    that an added token or a pre-tokenizer removes, or characters that a normalizer removes.
    """
    keeps: dict[str, Callable[[Mapping[str, Any]], bool]] = {
        **dict.fromkeys(("ByteLevel", "Metaspace", "Digits", "Prepend", "NFC"), lambda step: True),
        "Split": lambda step: step.get("behavior") != "Removed",
        "Replace": lambda step: _replaces_by_as_much(step, decoder),
    }
    steps = [
        *flatten_steps(values.get("normalizer"), "normalizers"),
        *flatten_steps(values.get("pre_tokenizer"), "pretokenizers"),
    ]
    if not all(step.get("type") in keeps and keeps[step["type"]](step) for step in steps):
        return None
    if any(token[key] for token in values["added_tokens"] for key in ("single_word", "lstrip", "rstrip")):
        return None
    if not _covers_known_text(values["model"], decoder):
        return None
    shrinks = NFC_SHRINKS if any(step["type"] == "NFC" for step in steps) else 1
    return shrinks * max(_MAX_CHARACTER_BYTES, longest_token)


def _replaces_by_as_much(step: Mapping[str, Any], decoder: TokenDecoder) -> bool:
    old = step.get("pattern", {}).get("String")
    return isinstance(old, str) and len(decoder.token_bytes(step["content"])) >= len(old.encode())


def _covers_known_text(model: Mapping[str, Any], decoder: TokenDecoder) -> bool:
    """Return True if the model never covers a run of unknown characters with one token."""
    kind, vocabulary, unknown = model.get("type", "BPE"), model["vocab"], model.get("unk_token")
    if kind == "BPE":
        if unknown is None or unknown not in vocabulary:  # an unknown character raises an error, except white space
            return decoder.byte_level
        has_bytes = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        return bool(has_bytes or not model.get("fuse_unk"))
    return kind == "WordLevel" and unknown not in vocabulary


def _guarded(call: Callable[[], Any]) -> Any:
    """Call the library, and raise its errors, which have no type of their own, as TokenizerError."""
    try:
        return call()
    except BaseException as error:
        # A Rust panic is not an Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        raise TokenizerError(f"the tokenizers library reports an error: {reason[:_MAX_REASON_LENGTH]}") from error
