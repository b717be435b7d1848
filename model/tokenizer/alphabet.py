"""Printable characters that stand for bytes in byte-level vocabularies.

This is GPT-2's scheme (Radford et al. 2019). A byte that is printable in Latin-1 stands for itself. The other bytes
are numbered in order from U+0100.
"""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in set(_PRINTABLE)]
BYTE_OF: dict[str, int] = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)
}
CHARACTER_OF: dict[int, str] = {byte: character for character, byte in BYTE_OF.items()}


class _ToLatin1(dict[int, str]):
    """Table for `str.translate`. Characters outside the alphabet become U+0100, which Latin-1 cannot encode."""

    def __missing__(self, code: int) -> str:
        return "\u0100"


_TO_LATIN_1 = _ToLatin1({ord(character): chr(byte) for character, byte in BYTE_OF.items()})


def to_bytes(token: str) -> bytes | None:
    """Return the bytes that a token's characters stand for; None if a character is not in the alphabet."""
    try:
        return token.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return None


def to_characters(token: bytes) -> str:
    """Return the characters that stand for a token's bytes."""
    return token.decode("latin-1").translate(CHARACTER_OF)
