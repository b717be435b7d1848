"""Labels of tokens for pictures and tables: one line each, with signs for invisible characters."""

import unicodedata

# File types of `service.cli.attention_heatmap`. Defined here because that module imports matplotlib.
SUFFIXES = (".png", ".svg", ".pdf")
# Limit of labels that are readable in one picture.
MAX_TOKENS = 64

# Prefix that `service.protocol.logprobs.format_token_name` gives to tokens that are not whole characters.
_BYTES = "bytes:"
_SPACE = "␣"
_SIGNS = {"\n": "↵", "\t": "⇥", "\x7f": "^?"}
_ELLIPSIS = "…"


def label(name: str, *, max_length: int = 16) -> str:
    """Return a token's name in readable form: "␣dog", "↵↵", or "⟨f0 9f⟩" for part of a character.

    Control characters are shown in caret notation ("^A"), other invisible characters as code points ("U+200D").

    Args:
        name: see `service.protocol.logprobs.format_token_name`.
        max_length: maximum characters. A longer label is cut and ends in an ellipsis.
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
    # Unicode categories Z and C: separators, controls, formats, surrogates, private use and unassigned.
    if unicodedata.category(character)[0] in "ZC":
        return f"U+{ord(character):04X}"
    # A combining character needs a base character to be visible.
    return f"◌{character}" if unicodedata.combining(character) else character
