"""What the bytes of a token are, according to the `decoder` of a tokenizer.json.

Understood are the decoders that join tokens without regard to their neighbours, but for a space taken off the very
start of a text:

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
    """Tokens to bytes.

    byte_level: characters stand for bytes.
    byte_fallback: <0xE2> is a byte.
    replacements: what is replaced in a token's text, in order.
    num_stripped: spaces that are taken off the start of a text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    num_stripped: int = 0

    def token_bytes(self, token: str) -> bytes:
        """The bytes a token of the vocabulary adds to a text that stands already."""
        if self.byte_level:
            found = to_bytes(token)
            return token.encode() if found is None else found
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.encode("utf-8", "replace")

    def strip_start(self, text: bytes) -> bytes:
        """The bytes of a whole text without the spaces that were put before it."""
        for _ in range(self.num_stripped):
            text = text.removeprefix(b" ")
        return text


def read_decoder(values: Mapping[str, Any] | None) -> TokenDecoder:
    """The decoder that tokenizer.json describes.

    Raises:
        TokenizerError: it is of a kind, or an order, that is not understood.
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
            f"its decoder ({_names(steps)}) joins tokens by spaces, and such texts cannot be streamed; "
            "add a Fuse decoder if tokens follow each other directly"
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
    # Files of before 2023 have add_prefix_space instead of prepend_scheme.
    prepends = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is True
    return _changed(
        decoder, replacements=(*decoder.replacements, (mark, " ")), num_stripped=decoder.num_stripped + prepends
    )


def _changed(decoder: TokenDecoder, **changes: Any) -> TokenDecoder:
    if decoder.byte_level:
        raise TokenizerError("its decoder has steps beside ByteLevel, which is not understood")
    return dataclasses.replace(decoder, **changes)


def _not_understood(step: Mapping[str, Any]) -> TokenizerError:
    return TokenizerError(
        f"its decoder step {dict(step)!r} is not understood here; "
        "known are ByteLevel, Metaspace, and Replace, ByteFallback, Fuse, Strip in this order"
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
