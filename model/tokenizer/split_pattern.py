"""Split patterns that have the same meaning in both regular expression engines.

`tokenizers` splits with Oniguruma and keeps unmatched text as separate pieces. tiktoken splits with fancy-regex and
drops unmatched text. A pattern is portable only if both engines read all its constructs alike and it matches
everywhere. Some constructs are excluded because of Oniguruma's Ruby syntax:

- `$` matches at the end of a line.
- `{1,3}+` is not possessive.
- `(?i)` changes what `|` separates.
- Ignoring case may match two letters with one.

A test shows that both engines put the same characters into the same character classes.
"""

import unicodedata
from functools import cache
from typing import Any

import regex

# GPT-2's pattern, which the `ByteLevel` pre-tokenizer of `tokenizers` uses with `use_regex`.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CATEGORIES = ("L", "N", "M", "P", "S", "Lu", "Ll", "Lt", "Lm", "Lo")  # all categories in the known models' patterns
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
    """Return True if a pattern splits every text into the same pieces in tiktoken and `tokenizers`, without gaps."""
    if not _SAFE.fullmatch(pattern):
        return False
    try:
        # A character must match without the help of a lookahead or `\z`, so replace both with a pattern that fails.
        everywhere = regex.compile(pattern.replace(r"(?!\S)", "(?!)").replace(r"\z", "(?!)"))
        return not regex.compile(pattern.replace(r"\z", r"\Z")).fullmatch("") and all(
            map(everywhere.fullmatch, _one_of_each_kind())
        )
    except regex.error:
        return False


def for_oniguruma(pattern: str) -> str | None:
    """Translate a tiktoken pattern to the syntax of `tokenizers`; return None if it has no portable form.

    A possessive `{m,n}+` at the end of an alternative becomes greedy. No later element could make it backtrack, so
    the meaning is the same.
    """
    greedy = regex.sub(r"(\{\d+(?:,\d*)?\})\+(?=\||\)|$)", r"\1", pattern)
    translated = regex.sub(r"(?<!\\)\$(?=\||\)|$)", r"\\z", greedy)
    return translated if is_portable(translated) else None


def splitting_by(pattern: str) -> dict[str, Any]:
    """Return the `pre_tokenizer` of a tokenizer.json that splits by a pattern and writes bytes as characters."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    to_characters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, to_characters]}


@cache
def _one_of_each_kind() -> tuple[str, ...]:
    """Return all of ASCII, and one other character of each pair (category, is white space).

    A pattern that `_SAFE` accepts cannot distinguish more characters than these.
    """
    kinds: dict[tuple[str, bool], str] = {}
    for character in map(chr, range(128, 0x3400)):  # has every category but private use and surrogates
        kinds.setdefault((unicodedata.category(character), character.isspace()), character)
    return (*map(chr, range(128)), *kinds.values(), "\ue000")
