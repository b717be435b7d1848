"""Tokens as labels: what is invisible gets a sign, on one line, whatever the token is."""

import unicodedata

# Of a picture of attention, `service.attention_picture`; here because that module needs matplotlib.
SUFFIXES = (".png", ".svg", ".pdf")
# More labels than this cannot be read in one picture.
MAX_TOKENS = 64

# As `service.logprobs.token_name` begins the name of a token that is not whole characters.
_BYTES = "bytes:"
_SPACE = "␣"
_SIGNS = {"\n": "↵", "\t": "⇥", "\x7f": "^?"}
_ELLIPSIS = "…"


def label(name: str, *, max_length: int = 16) -> str:
    """A token's name as people can read it: "␣dog", "↵↵", "⟨f0 9f⟩" for a piece of a character.

    Control characters are written as on a keyboard ("^A"), what else cannot be seen as its number ("U+200D").

    Args:
        name: see `service.logprobs.token_name`.
        max_length: characters; longer ones end in an ellipsis.
    """
    if name.startswith(_BYTES):
        text = f"⟨{name.removeprefix(_BYTES).replace(chr(92) + 'x', ' ').strip()}⟩"
    else:
        text = "".join(map(_visible, name))
    return text if len(text) <= max_length else text[: max_length - 1] + _ELLIPSIS


def _visible(character: str) -> str:
    if character == " ":
        return _SPACE
    if character in _SIGNS:
        return _SIGNS[character]
    if ord(character) < 0x20:
        return f"^{chr(ord(character) + 0x40)}"
    # Separators, formats (joiners, direction marks), controls, surrogates, private and unassigned ones.
    if unicodedata.category(character)[0] in "ZC":
        return f"U+{ord(character):04X}"
    # A mark that sits on the letter before it needs one.
    return f"◌{character}" if unicodedata.combining(character) else character
