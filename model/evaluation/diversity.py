"""How much samples repeat: distinct-n over all of them, repetition inside each. Torch-free.

Both count words, so that models with different tokenizers can be compared: runs of letters and digits, lower case,
"don't" being one. A script without spaces is not divided.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_WORD = re.compile(r"\w+(?:['’]\w+)*")
REPEATED_N = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Diversity:
    """The samples of one temperature.

    distinct: distinct-1, -2 and -3. repetition: mean of `repetition` over the samples that are long enough.
    A figure is None where the samples have too few words for it.
    """

    temperature: float
    num_samples: int
    num_words: int
    distinct: tuple[float | None, float | None, float | None]
    repetition: float | None


def measure_diversity(temperature: float, texts: Sequence[str]) -> Diversity:
    """The figures of some samples."""
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
    """A text's words."""
    return _WORD.findall(text.lower())


def distinct(samples: Iterable[Sequence[str]], n: int) -> float | None:
    """distinct-n: different n-grams over n-grams, of all samples together; None where there are none.

    Li et al. 2016 (arXiv 1510.03055), section 5.2. It falls as more is sampled: compare equal numbers of samples only.
    """
    grams = [gram for sample in samples for gram in _grams(sample, n)]
    return len(set(grams)) / len(grams) if grams else None


def repetition(sample: Sequence[str], n: int = REPEATED_N) -> float | None:
    """Share of a sample's n-grams that stood in it before: 1 - different n-grams / n-grams; None where it has none.

    seq-rep-n of Welleck et al. 2020 (arXiv 1908.04319), section 6.1.
    """
    unique = distinct([sample], n)
    return None if unique is None else 1 - unique


def _grams(sample: Sequence[str], n: int) -> Iterable[tuple[str, ...]]:
    return zip(*(itertools.islice(sample, start, None) for start in range(n)), strict=False)
