"""Tokenizers of the Hugging Face `tokenizers` library, described by a tokenizer.json. Torch-free.

The library encodes. Decoding is implemented here, because the library's decoding cannot be streamed. A decoder is
supported if each token adds the same bytes to a text, whatever its neighbours are. The one exception is the removal of
spaces at the start of a text. Supported decoders:

    ByteLevel                                       every character stands for a byte (GPT-2)
    Replace, ByteFallback, Fuse, Strip in sequence  ▁ is a space, <0xE2> a byte (Llama 2, Gemma)
    Metaspace                                       ▁ is a space (Mistral, T5)
    Fuse                                            tokens are text
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from model.io.files import parsing
from model.tokenizer.bos_eos import TokenizerConfig, read_bos_token_id, read_eos_token_ids
from model.tokenizer.interface import Tokenizer, TokenizerError

TOKENIZER_FILE = "tokenizer.json"
# NFC leaves at least a quarter of a text's bytes. The worst case known: U+0390 has 2 bytes, and its longest spelling
# (U+1FBE U+0308 U+0301) has 7.
NFC_SHRINKS = 4
_MODELS = ("BPE", "WordLevel", "Unigram")
_MAX_REASON_LENGTH = 200
_MAX_CHARACTER_BYTES = 4
BYTE_LEVEL_DECODER = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
_PLAIN_ADDED_TOKEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


# GPT-2's printable characters for bytes (Radford et al. 2019). A byte that is printable in Latin-1 stands for itself.
# The other bytes are numbered in order from U+0100.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_NOT_PRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTER_OF_BYTE: dict[int, str] = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + index) for index, byte in enumerate(_NOT_PRINTABLE)
}
_BYTE_OF_CHARACTER = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}
# Code of the byte's character in Latin-1; for characters that stand for no byte, of a character beyond Latin-1.
_BYTE_AS_LATIN_1 = dict.fromkeys(range(0x100), 0xFFFF) | {ord(c): byte for c, byte in _BYTE_OF_CHARACTER.items()}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def to_characters(token: bytes) -> str:
    """Return GPT-2's characters that stand for the bytes of a token."""
    return token.decode("latin-1").translate(CHARACTER_OF_BYTE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDecoder:
    """Conversion of the tokens of a tokenizer.json to bytes.

    byte_level: every character of a token stands for a byte.
    byte_fallback: a token such as <0xE2> stands for one byte.
    replacements: pairs of old and new text, replaced in a token in this order.
    num_stripped: maximum number of spaces to remove from the start of a whole text; encoding has added them.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    num_stripped: int = 0

    def all_token_bytes(self, tokens: Sequence[str]) -> Iterable[bytes]:
        """Return `token_bytes` of each token. Where every character stands for a byte, one pass computes all."""
        if not self.byte_level:
            return map(self.token_bytes, tokens)
        try:
            joined = "".join(tokens).translate(_BYTE_AS_LATIN_1).encode("latin-1")
        except UnicodeEncodeError:  # an added token, which is plain text
            return map(self.token_bytes, tokens)
        ends = [*accumulate(map(len, tokens), initial=0)]
        return (joined[begin:end] for begin, end in pairwise(ends))

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes that a token of the vocabulary adds to a non-empty text."""
        if self.byte_level:
            try:
                return bytes([_BYTE_OF_CHARACTER[character] for character in token])
            except KeyError:  # an added token, which is plain text
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.encode("utf-8", "replace")


def flatten_steps(values: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a decoder, normalizer or pre-tokenizer as a flat list, empty for None.

    key: key of the steps in a Sequence.
    """
    if values is None:
        return []
    if values.get("type") != "Sequence":
        return [values]
    return [step for part in values[key] for step in flatten_steps(part, key)]


def read_decoder(values: Mapping[str, Any] | None) -> TokenDecoder:
    """Read the `decoder` of a tokenizer.json. Raises TokenizerError for an unsupported step or order of steps."""
    steps = flatten_steps(values, "decoders")
    kinds = [str(step.get("type")) for step in steps]
    if "ByteLevel" in kinds:
        if not set(kinds) <= {"ByteLevel", "Fuse"} or kinds.count("ByteLevel") > 1:
            raise TokenizerError("the decoder has steps besides ByteLevel, which is not supported; use ByteLevel alone")
        return TokenDecoder(byte_level=True)
    replacements: list[tuple[str, str]] = []
    num_stripped = 0
    for index, step in enumerate(steps):
        match step:
            case {"type": "Fuse" | "ByteFallback"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
                replacements.append((old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if "Fuse" in kinds[:index]:
                num_stripped += start
            case {"type": "Metaspace", "replacement": str(old)} if old:
                replacements.append((old, " "))
                # Files from before 2023 have add_prefix_space instead of prepend_scheme.
                prepends = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
                num_stripped += bool(prepends)
            case _:
                raise TokenizerError(
                    f"the decoder step {dict(step)!r} is not supported; "
                    "supported are ByteLevel, Metaspace, and Replace, ByteFallback, Fuse, Strip in this order"
                )
    if not {"Fuse", "Metaspace"} & set(kinds):
        raise TokenizerError(
            f"the decoder ({', '.join(kinds) or 'none'}) joins tokens with spaces, which cannot be streamed; "
            "add a Fuse decoder if tokens are joined without spaces"
        )
    return TokenDecoder(
        byte_fallback="ByteFallback" in kinds, replacements=tuple(replacements), num_stripped=num_stripped
    )


def tokenizer_from_json(path: Path, values: dict[str, Any], config: TokenizerConfig) -> "LibraryTokenizer":
    """Make a tokenizer from the values of a tokenizer.json and the other files of its directory.

    Args:
        path: the file with the values, which errors name; the other files are beside it.

    Raises:
        CheckpointError: a part of a file is malformed or not supported.
    """
    with parsing(path):
        decoder, vocabulary = read_decoder(values.get("decoder")), _read_vocabulary(values["model"])
        added_tokens = _read_added_tokens(values, config, vocabulary)
        vocabulary |= {token["content"]: token["id"] for token in added_tokens}
        special = {token["content"]: token["id"] for token in added_tokens if token["special"]}
        bos_token_id = read_bos_token_id(config, values.get("post_processor"), vocabulary)
        if bos_token_id is not None:
            special |= {name: token_id for name, token_id in vocabulary.items() if token_id == bos_token_id}
        return LibraryTokenizer(
            {**values, "added_tokens": added_tokens},
            vocabulary,
            decoder=decoder,
            special_tokens=special,
            eos_token_ids=read_eos_token_ids(path.parent, config, vocabulary),
            bos_token_id=bos_token_id,
        )


class LibraryTokenizer(Tokenizer):
    """Tokenizer of the `tokenizers` library.

    Args:
        values: the object of a tokenizer.json, with all added tokens.
        vocabulary: id of each token, with all added tokens.

    Raises:
        TokenizerError: the library rejects the values, or would treat an added token differently from the files.
    """

    def __init__(
        self,
        values: dict[str, Any],
        vocabulary: Mapping[str, int],
        *,
        decoder: TokenDecoder,
        special_tokens: dict[str, int],
        eos_token_ids: tuple[int, ...],
        bos_token_id: int | None,
    ) -> None:
        self._library = _guarded(lambda: tokenizers.Tokenizer.from_buffer(msgspec.json.encode(values)))
        self._library.encode_special_tokens = True  # names of special tokens in a text are text
        self._library.no_truncation()
        self._library.no_padding()
        self._check_added_tokens(values["added_tokens"])
        self._decoder = decoder
        self._alphabet = _alphabet(values["model"], decoder)
        tokens = {token_id: token for token, token_id in vocabulary.items()}
        # An added token's text need not be its key: a normalized added token stands for its normalized text.
        tokens |= {token["id"]: self._library.id_to_token(token["id"]) for token in values["added_tokens"]}
        for token_id in special_tokens.values():
            tokens.pop(token_id, None)
        token_bytes = zip(tokens, decoder.all_token_bytes([*tokens.values()]), strict=True)
        super().__init__(token_bytes, special_tokens, eos_token_ids=eos_token_ids, bos_token_id=bos_token_id)
        self.kind = f"{'byte-level ' if decoder.byte_level else ''}{type(self._library.model).__name__}"
        self.longest_token = _max_covered_bytes(values, decoder, max(map(len, self._token_bytes)))

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if self._alphabet is not None:
            self._check_nothing_is_dropped(text, self._alphabet)
        library = self._special_parser if parse_special else self._library
        token_ids: list[int] = _guarded(lambda: library.encode(text, add_special_tokens=False)).ids
        return token_ids

    def find_token(self, name: str) -> int | None:
        """Return the id of the token with this name, special or not; None if the vocabulary has no such token."""
        token_id: int | None = self._library.token_to_id(name)
        return token_id

    def decode(self, token_ids: Iterable[int]) -> str:
        text = self._joined_bytes(token_ids)
        for _ in range(self._decoder.num_stripped):
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def to_json(self) -> str:
        """Return this tokenizer as the text of a tokenizer.json."""
        return str(self._library.to_str())

    @cached_property
    def _special_parser(self) -> tokenizers.Tokenizer:
        """Second library tokenizer, which parses special tokens: switching one tokenizer is not thread-safe.

        Both share the vocabulary and the merges: 40 MiB for 152,000 tokens.
        """
        library = tokenizers.Tokenizer(self._library.model)
        library.normalizer, library.pre_tokenizer = self._library.normalizer, self._library.pre_tokenizer
        for _, token in sorted(self._library.get_added_tokens_decoder().items()):
            (library.add_special_tokens if token.special else library.add_tokens)([token])
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
                    f"the added token {token['content']!r} is empty after normalization; set its `normalized` to false"
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
    """Return the entry of a special token in the `added_tokens` of a tokenizer.json."""
    return {**_PLAIN_ADDED_TOKEN, "id": token_id, "content": content}


def pre_tokenizer_for(pattern: str) -> dict[str, Any]:
    """Return the `pre_tokenizer` object of a tokenizer.json for byte-level BPE.

    It splits a text by a pattern, then writes each byte as the character that stands for it (GPT-2).
    """
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
    if {*map(type, vocabulary.values())} != {int} or min(vocabulary.values()) < 0:
        raise TokenizerError("the vocabulary is empty, or has ids other than integers from 0; copy the file again")
    if len({*vocabulary.values()}) < len(vocabulary):
        [(token_id, _)] = Counter(vocabulary.values()).most_common(1)
        raise TokenizerError(f"token ids must be unique, but several tokens have {token_id}; copy the file again")
    return vocabulary


def _read_added_tokens(
    values: Mapping[str, Any], config: TokenizerConfig, vocabulary: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return the added tokens of tokenizer.json, which has precedence, and tokenizer_config.json, sorted by id.

    Tokens that the config names as special become special, also those of the vocabulary. Raises TokenizerError for
    an entry without an id or a content.
    """
    by_id = {vocabulary[name]: added_token(name, vocabulary[name]) for name in config.special & vocabulary.keys()}
    listed = [{"id": token_id, **entry} for token_id, entry in config.added_tokens.items()]
    for entry in (*listed, *values.get("added_tokens", [])):
        token_id, content = entry.get("id"), entry.get("content")
        if not isinstance(token_id, int) or token_id < 0 or not isinstance(content, str) or not content:
            raise TokenizerError(f"an added token needs an id and a content, unlike {entry!r}; correct it")
        is_special = entry.get("special") is True or content in config.special
        normalized = entry.get("normalized", entry.get("special") is not True)
        by_id[token_id] = {**_PLAIN_ADDED_TOKEN, **entry, "normalized": normalized, "special": is_special}
    return [by_id[token_id] for token_id in sorted(by_id)]


def _alphabet(model: Mapping[str, Any], decoder: TokenDecoder) -> frozenset[str] | None:
    """Return the characters that have tokens, if texts with other characters must be rejected; else None."""
    vocabulary, unknown = model["vocab"], model.get("unk_token")
    if model.get("type") == "WordLevel" and unknown not in vocabulary:
        return frozenset(vocabulary) if all(len(token) == 1 for token in vocabulary) else None
    if model.get("type", "BPE") != "BPE" or unknown is not None or model.get("byte_fallback"):
        return None
    alphabet = frozenset(token for token in vocabulary if len(token) == 1)
    return None if decoder.byte_level and alphabet.issuperset(CHARACTER_OF_BYTE.values()) else alphabet


def _max_covered_bytes(values: Mapping[str, Any], decoder: TokenDecoder, longest_token: int) -> int | None:
    """Return the maximum number of text bytes that one token covers; None if there is no limit.

    With this maximum, the server rejects a text far longer than the context without tokenizing it. There is no limit if
    one token can cover unknown characters or words of any length, or if a step of the tokenizer removes characters.
    """
    steps = [
        *flatten_steps(values.get("normalizer"), "normalizers"),
        *flatten_steps(values.get("pre_tokenizer"), "pretokenizers"),
    ]
    if not all(_keeps_length(step, decoder) for step in steps) or not _covers_known_text(values["model"], decoder):
        return None
    if any(token[key] for token in values["added_tokens"] for key in ("single_word", "lstrip", "rstrip")):
        return None
    shrinks = NFC_SHRINKS if any(step["type"] == "NFC" for step in steps) else 1
    return shrinks * max(_MAX_CHARACTER_BYTES, longest_token)


def _keeps_length(step: Mapping[str, Any], decoder: TokenDecoder) -> bool:
    """Return True if a step of a normalizer or pre-tokenizer never removes text, except that NFC shortens text."""
    match step:
        case {"type": "ByteLevel" | "Metaspace" | "Digits" | "Prepend" | "NFC"}:
            return True
        case {"type": "Split"}:
            return step.get("behavior") != "Removed"
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(decoder.token_bytes(new)) >= len(old.encode())
    return False


def _covers_known_text(model: Mapping[str, Any], decoder: TokenDecoder) -> bool:
    """Return True if no token of the BPE, WordLevel or Unigram model can cover a run of unknown characters."""
    kind, vocabulary, unknown = model.get("type", "BPE"), model["vocab"], model.get("unk_token")
    if kind == "BPE":
        if unknown is None or unknown not in vocabulary:  # an unknown character raises an error, except white space
            return decoder.byte_level
        has_bytes = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        return bool(has_bytes or not model.get("fuse_unk"))
    return kind == "WordLevel" and unknown not in vocabulary


def _guarded(call: Callable[[], Any]) -> Any:
    """Return the result of a call to the `tokenizers` library; raise its errors and Rust panics as TokenizerError."""
    try:
        return call()
    except BaseException as error:
        # A Rust panic is not an Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        raise TokenizerError(f"the tokenizers library reports an error: {reason[:_MAX_REASON_LENGTH]}") from error
