"""Bytes of a token, from the `decoder` of a tokenizer.json.

A decoder is supported if the bytes of a token do not depend on its neighbours, because only such tokens can be
streamed. The one exception is the removal of spaces at the start of a text. Supported:

    ByteLevel                                       every character stands for a byte (GPT-2)
    Replace, ByteFallback, Fuse, Strip in sequence  ▁ is a space, <0xE2> a byte (Llama 2, Gemma)
    Metaspace                                       ▁ is a space (Mistral, T5)
    Fuse                                            tokens are text
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.tokenizer.interface import TokenizerError

# GPT-2's printable characters for bytes (Radford et al. 2019). A byte that is printable in Latin-1 stands for itself.
# The other bytes are numbered in order from U+0100.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_NOT_PRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTER_OF_BYTE: dict[int, str] = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + index) for index, byte in enumerate(_NOT_PRINTABLE)
}
_BYTE_OF_CHARACTER = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def to_characters(token: bytes) -> str:
    """Return the characters that stand for the bytes of a token."""
    return token.decode("latin-1").translate(CHARACTER_OF_BYTE)


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
            try:
                return bytes([_BYTE_OF_CHARACTER[character] for character in token])
            except KeyError:  # an added token, which is plain text
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.encode("utf-8", "replace")

    def strip_start(self, text: bytes) -> bytes:
        """Return the bytes of a whole text without the spaces that encoding put before it."""
        for _ in range(self.num_stripped):
            text = text.removeprefix(b" ")
        return text


def flatten_steps(values: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a decoder, normalizer or pre-tokenizer; `key` names the list of a Sequence."""
    if values is None:
        return []
    if values.get("type") != "Sequence":
        return [values]
    return [step for part in values[key] for step in flatten_steps(part, key)]


def read_decoder(values: Mapping[str, Any] | None) -> TokenDecoder:
    """Read the `decoder` of a tokenizer.json.

    Raises:
        TokenizerError: the type or the order of the decoder's steps is not supported.
    """
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
