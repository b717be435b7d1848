"""Split patterns that mean the same to both regular expression engines.

`tokenizers` splits with Oniguruma and keeps what the pattern does not match as pieces of its own; tiktoken splits with
fancy-regex and drops it. A pattern is taken over only if it is made of what both read alike, and if it matches
everywhere. Oniguruma's Ruby syntax is why some constructs are left out: there `$` ends a line, `{1,3}+` is not
possessive, `(?i)` changes what `|` separates, and ignoring case may match two letters with one.
That both engines put the same characters into the same classes is shown by a test.
"""

import unicodedata
from functools import cache
from typing import Any

import regex

# Of tokenizers' `ByteLevel` pre-tokenizer with `use_regex`: GPT-2's.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CATEGORIES = ("L", "N", "M", "P", "S", "Lu", "Ll", "Lt", "Lm", "Lo")  # all that any pattern of today asks for
_CLASS = rf"\\[pP]\{{(?:{'|'.join(CATEGORIES)})\}}|\\[sSrnt]"
_PLAIN = r"[A-Za-z0-9 '\"/_=<>,;:@#%!`]|\\[.\-/\\\[\](){}|?*+^$'\"]"
_SAFE = regex.compile(
    rf"""(?:
        \(\?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d\)       # contractions, ignoring case: only these exact ones
      | \(\?i:\[sdmt\]\|ll\|ve\|re\)
      | \(\?:  |  \(\?!\\S\)  |  \((?!\?)  |  \)  |  \|  |  \\z
      | (?:{_CLASS}|{_PLAIN})
      | \[\^?(?:{_CLASS}|[A-Za-z0-9]-[A-Za-z0-9]|{_PLAIN})+\]
      | [?*+][?+]?(?![?*+{{])                        # greedy, lazy or possessive
      | \{{\d+(?:,\d*)?\}}(?![?*+{{])                # greedy only
    )*""",
    regex.VERBOSE,
)


def is_portable(pattern: str) -> bool:
    """Whether a pattern splits every text into the same pieces in tiktoken as in `tokenizers`, leaving nothing out."""
    if not _SAFE.fullmatch(pattern):
        return False
    try:
        # A place where a look ahead would have to help does not count as matched.
        everywhere = regex.compile(pattern.replace(r"(?!\S)", "(?!)").replace(r"\z", "(?!)"))
        return not regex.compile(pattern.replace(r"\z", r"\Z")).fullmatch("") and all(
            map(everywhere.fullmatch, _one_of_each_kind())
        )
    except regex.error:
        return False


def for_oniguruma(pattern: str) -> str | None:
    """A pattern of tiktoken's in the syntax that `tokenizers` reads; None if it has no portable form.

    A possessive repetition that ends its alternative has nothing to give back to, so it is greedy as well.
    """
    greedy = regex.sub(r"(\{\d+(?:,\d*)?\})\+(?=\||\)|$)", r"\1", pattern)
    translated = regex.sub(r"(?<!\\)\$(?=\||\)|$)", r"\\z", greedy)
    return translated if is_portable(translated) else None


def splitting_by(pattern: str) -> dict[str, Any]:
    """The `pre_tokenizer` of a tokenizer.json that splits by a pattern and writes bytes as characters."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    to_characters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, to_characters]}


@cache
def _one_of_each_kind() -> tuple[str, ...]:
    """ASCII, and beyond it one character of each category, with white space apart: all that a safe pattern tells."""
    kinds: dict[tuple[str, bool], str] = {}
    for character in map(chr, range(128, 0x3400)):  # as far as every category but private use and surrogates
        kinds.setdefault((unicodedata.category(character), character.isspace()), character)
    return (*map(chr, range(128)), *kinds.values(), "\ue000")
