"""How byte-level vocabularies write bytes as printable characters.

GPT-2's scheme (Radford et al. 2019): a byte that Latin-1 prints stands for itself, the others follow from U+0100 on.
"""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in set(_PRINTABLE)]
BYTE_OF: dict[str, int] = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)
}
CHARACTER_OF: dict[int, str] = {byte: character for character, byte in BYTE_OF.items()}


class _ToLatin1(dict[int, str]):
    """For `str.translate`: what is not in the alphabet becomes what Latin-1 cannot hold."""

    def __missing__(self, code: int) -> str:
        return "\u0100"


_TO_LATIN_1 = _ToLatin1({ord(character): chr(byte) for character, byte in BYTE_OF.items()})


def to_bytes(token: str) -> bytes | None:
    """The bytes a token's characters stand for; None if one is not in the alphabet."""
    try:
        return token.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return None


def to_characters(token: bytes) -> str:
    """The characters that stand for these bytes."""
    return token.decode("latin-1").translate(CHARACTER_OF)
