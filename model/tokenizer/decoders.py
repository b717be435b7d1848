"""Bytes of a token, from the `decoder` of a tokenizer.json.

A decoder is supported if the bytes of a token do not depend on its neighbours, because only such tokens can be
streamed. The one exception is the removal of spaces at the start of a text. Supported:

    ByteLevel                                       every character stands for a byte (GPT-2)
    Replace, ByteFallback, Fuse, Strip in sequence  ▁ is a space, <0xE2> a byte (Llama 2, Gemma)
    Metaspace                                       ▁ is a space (Mistral, T5)
    Fuse                                            tokens are text
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model.tokenizer.alphabet import to_bytes
from model.tokenizer.interface import TokenizerError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDecoder:
    """Conversion of tokens to bytes.

    byte_level: every character of a token stands for a byte.
    byte_fallback: a token such as <0xE2> stands for one byte.
    replacements: pairs of old and new text, replaced in a token in this order.
    num_stripped: maximum number of spaces to remove from the start of a text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    num_stripped: int = 0

    def token_bytes(self, token: str) -> bytes:
        """Return the bytes that a token of the vocabulary adds to a non-empty text."""
        if self.byte_level:
            found = to_bytes(token)
            return token.encode() if found is None else found
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.encode("utf-8", "replace")

    def strip_start(self, text: bytes) -> bytes:
        """Return the bytes of a whole text without the spaces that encoding put before it."""
        for _ in range(self.num_stripped):
            text = text.removeprefix(b" ")
        return text


def read_decoder(values: Mapping[str, Any] | None) -> TokenDecoder:
    """Read the `decoder` of a tokenizer.json.

    Raises:
        TokenizerError: the type or the order of the decoder's steps is not supported.
    """
    steps = _steps(values)
    kinds = [step.get("type") for step in steps]
    decoder = TokenDecoder()
    for index, step in enumerate(steps):
        read = _READERS.get(str(kinds[index]))
        if read is None or (kinds[index] == "Strip" and "Fuse" not in kinds[:index]):
            raise _not_understood(step)
        decoder = read(decoder, step)
    if not decoder.byte_level and not {"Fuse", "Metaspace"} & set(kinds):
        raise TokenizerError(
            f"the decoder ({_names(steps)}) joins tokens with spaces, which cannot be streamed; "
            "add a Fuse decoder if tokens are joined without spaces"
        )
    return decoder


def _steps(values: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if values is None:
        return []
    return list(values.get("decoders", [])) if values.get("type") == "Sequence" else [values]


def _byte_level(decoder: TokenDecoder, step: Mapping[str, Any]) -> TokenDecoder:
    if decoder != TokenDecoder():
        raise _not_understood(step)
    return TokenDecoder(byte_level=True)


def _byte_fallback(decoder: TokenDecoder, step: Mapping[str, Any]) -> TokenDecoder:
    return _changed(decoder, byte_fallback=True)


def _fuse(decoder: TokenDecoder, step: Mapping[str, Any]) -> TokenDecoder:
    return decoder


def _replace(decoder: TokenDecoder, step: Mapping[str, Any]) -> TokenDecoder:
    old, new = step.get("pattern", {}).get("String"), step.get("content")
    if not isinstance(old, str) or not old or not isinstance(new, str):
        raise _not_understood(step)
    return _changed(decoder, replacements=(*decoder.replacements, (old, new)))


def _strip(decoder: TokenDecoder, step: Mapping[str, Any]) -> TokenDecoder:
    if step.get("content") != " " or step.get("stop") != 0 or not isinstance(step.get("start"), int):
        raise _not_understood(step)
    return _changed(decoder, num_stripped=decoder.num_stripped + step["start"])


def _metaspace(decoder: TokenDecoder, step: Mapping[str, Any]) -> TokenDecoder:
    mark = step.get("replacement")
    if not isinstance(mark, str) or not mark:
        raise _not_understood(step)
    # Files from before 2023 have add_prefix_space instead of prepend_scheme.
    prepends = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is True
    return _changed(
        decoder, replacements=(*decoder.replacements, (mark, " ")), num_stripped=decoder.num_stripped + prepends
    )


def _changed(decoder: TokenDecoder, **changes: Any) -> TokenDecoder:
    if decoder.byte_level:
        raise TokenizerError("the decoder has steps besides ByteLevel, which is not supported; use ByteLevel alone")
    return dataclasses.replace(decoder, **changes)


def _not_understood(step: Mapping[str, Any]) -> TokenizerError:
    return TokenizerError(
        f"the decoder step {dict(step)!r} is not supported; "
        "supported are ByteLevel, Metaspace, and Replace, ByteFallback, Fuse, Strip in this order"
    )


def _names(steps: list[Mapping[str, Any]]) -> str:
    return ", ".join(str(step.get("type")) for step in steps) if steps else "none"


_READERS: Mapping[str, Callable[[TokenDecoder, Mapping[str, Any]], TokenDecoder]] = {
    "ByteLevel": _byte_level,
    "Replace": _replace,
    "ByteFallback": _byte_fallback,
    "Fuse": _fuse,
    "Strip": _strip,
    "Metaspace": _metaspace,
}
