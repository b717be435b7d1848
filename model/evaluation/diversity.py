"""Diversity metrics of samples: distinct-n over all samples, and repetition inside each sample. Torch-free.

Both metrics count words instead of tokens, so that models with different tokenizers can be compared. A word is a
lower-case run of letters, digits and underscores; "don't" is one word. Text in a script without spaces is not split
into words.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_WORD = re.compile(r"\w+(?:['’]\w+)*")
REPEATED_N = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Diversity:
    """Diversity of the samples at one temperature.

    distinct: distinct-1, distinct-2 and distinct-3.
    repetition: mean of `repetition` over the samples that have enough words.

    A value is None if no sample has enough words for it.
    """

    temperature: float
    num_samples: int
    num_words: int
    distinct: tuple[float | None, float | None, float | None]
    repetition: float | None


def measure_diversity(temperature: float, texts: Sequence[str]) -> Diversity:
    """Measure the diversity of samples that were made at one temperature."""
    samples = [words(text) for text in texts]
    repeated = [share for sample in samples if (share := repetition(sample)) is not None]
    return Diversity(
        temperature=temperature,
        num_samples=len(samples),
        num_words=sum(map(len, samples)),
        distinct=(distinct(samples, 1), distinct(samples, 2), distinct(samples, 3)),
        repetition=sum(repeated) / len(repeated) if repeated else None,
    )


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())


def distinct(samples: Iterable[Sequence[str]], n: int) -> float | None:
    """Return distinct-n over all samples together: unique n-grams / n-grams; None without n-grams.

    Source: Li et al. 2016 (arXiv 1510.03055), section 5.2. The value falls as the amount of text grows, so compare only
    equal numbers of samples.
    """
    grams = [gram for sample in samples for gram in _grams(sample, n)]
    return len(set(grams)) / len(grams) if grams else None


def repetition(sample: Sequence[str], n: int = REPEATED_N) -> float | None:
    """Return the share of repeated n-grams in a sample: 1 - unique n-grams / n-grams; None without n-grams.

    Source: seq-rep-n of Welleck et al. 2020 (arXiv 1908.04319), section 6.1.
    """
    unique = distinct([sample], n)
    return None if unique is None else 1 - unique


def _grams(sample: Sequence[str], n: int) -> Iterable[tuple[str, ...]]:
    return zip(*(itertools.islice(sample, start, None) for start in range(n)), strict=False)
