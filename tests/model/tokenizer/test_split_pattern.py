"""Split patterns of an export: both regex engines split alike, and patterns that could differ are rejected."""

import pytest
import tiktoken
from tokenizers import Regex, pre_tokenizers

from model.tokenizer.export import pattern_for_oniguruma
from model.tokenizer.split_patterns import CL100K_PATTERN, GPT2_PATTERN, LLAMA3_PATTERN, O200K_PATTERN, QWEN_PATTERN
from model.training.data.bpe import SPLIT_PATTERN
from tests.model.tokenizer.texts import all_texts

CATEGORIES = ("L", "N", "M", "P", "S", "Lu", "Ll", "Lt", "Lm", "Lo")  # all that an exported pattern may have
KINDS = [r"\s", r"(?i:[sdmt])", r"(?i:ll|ve|re)", *(rf"\p{{{name}}}" for name in CATEGORIES)]
BYTES = {bytes([byte]): byte for byte in range(256)}
# All planes with assigned characters, and every 97th code point of the others.
CODES = [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000), *range(0x40000, 0x110000, 97)]
EVERY_CHARACTER = "".join(map(chr, CODES))
GPT2_BY_TIKTOKEN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
MERGING = {**BYTES, **{bytes([a, b]): 256 + a * 256 + b for a in range(256) for b in range(256)}}
PORTABLE = [GPT2_PATTERN, LLAMA3_PATTERN, QWEN_PATTERN, O200K_PATTERN]
TRANSLATED = [CL100K_PATTERN, SPLIT_PATTERN, GPT2_BY_TIKTOKEN]


def kept_by_tiktoken(pattern: str, text: str) -> str:
    """Return the parts of the text that the pattern matches, joined, by tiktoken's regex engine."""
    encoding = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=BYTES, special_tokens={})
    return bytes(encoding.encode_ordinary(text)).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_both_engines_put_every_character_in_the_same_class(kind: str) -> None:
    split = pre_tokenizers.Split(Regex(f"(?:{kind})+"), "removed")
    rest: set[str] = set()
    for begin in range(0, len(EVERY_CHARACTER), 1000):  # Oniguruma's wrapper is slow on long texts
        rest.update(*(piece for piece, _ in split.pre_tokenize_str(EVERY_CHARACTER[begin : begin + 1000])))
    assert set(kept_by_tiktoken(f"(?:{kind})+", EVERY_CHARACTER)) == set(EVERY_CHARACTER) - rest


@pytest.mark.parametrize("pattern", PORTABLE)
def test_portable_patterns_are_exported_unchanged(pattern: str) -> None:
    assert pattern_for_oniguruma(pattern) == pattern


@pytest.mark.parametrize("pattern", TRANSLATED)
def test_patterns_of_tiktoken_are_translated(pattern: str) -> None:
    """In tiktoken, the translated pattern splits like the original; test_export.py compares it with `tokenizers`."""
    translated = pattern_for_oniguruma(pattern)
    assert translated is not None
    assert translated != pattern
    original, other = (
        tiktoken.Encoding("test", pat_str=p, mergeable_ranks=MERGING, special_tokens={}) for p in (pattern, translated)
    )
    for text in all_texts():
        assert original.encode_ordinary(text) == other.encode_ordinary(text)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?i)a|\s|\S",  # different scope of |
        r"(?i:ss)|\s|\S",  # matches a sharp s in Oniguruma
        r"\s+$x|\s|\S",  # the end of the text in fancy-regex, of a line in Oniguruma
        r"\p{N}{1,3}+x|\s|\S",  # possessive in fancy-regex, repeated in Oniguruma
        r"[a&&b]|\s|\S",
        r".|\n",
        r"\w+|\s|\S",
        r"\h|\s|\S",
        r"(?<=a)b|\s|\S",
        r"\p{Han}|\s|\S",
    ],
)
def test_constructs_that_the_engines_read_differently_are_rejected(pattern: str) -> None:
    assert pattern_for_oniguruma(pattern) is None
