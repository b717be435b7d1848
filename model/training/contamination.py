"""Nothing held out stands in training: documents that share a run of words with a held-out one are left out.

Words are compared without case, punctuation and spaces. A run of RUN_WORDS words is what a quotation has and two
authors have not; 13 are the usual measure where a model is tested on questions (Brown et al. 2020, arXiv 2005.14165,
appendix C), but of 13 there are many in the phrases an encyclopedia repeats for each village.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from model.training.data import Document, Source

RUN_WORDS = 20
_WORD = re.compile(r"[^\W_]+")
_Hashes = NDArray[np.uint64]


def leave_out_held_out(sources: Sequence[Source]) -> list[Source]:
    """The sources without training documents that share RUN_WORDS words in a row with what any of them holds out.

    Of a text with fewer words it is the whole that is compared.
    """
    held_out = [text for source in sources for text in source.held_out]
    if not held_out:
        return list(sources)
    runs = _Runs()
    known = np.unique(np.concatenate([runs.hashes(held_out)[0], runs.whole(held_out)]))
    return [_without(source, runs, known) for source in sources]


def _without(source: Source, runs: "_Runs", known: _Hashes) -> Source:
    kept: list[Document] = []
    for start in range(0, len(source.train), 4096):  # bounds the memory
        documents = source.train[start : start + 4096]
        texts = [document.text for document in documents]
        hashes, owners = runs.hashes(texts)
        shares = np.isin(runs.whole(texts), known)
        shares[owners[np.isin(hashes, known)]] = True
        kept += [document for document, shared in zip(documents, shares, strict=True) if not shared]
    return dataclasses.replace(source, train=kept, left_out=len(source.train) - len(kept))


class _Runs:
    """Hashes of runs of words. Words are numbered as they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def hashes(self, texts: Sequence[str]) -> tuple[_Hashes, NDArray[np.int64]]:
        """The hash of each run of RUN_WORDS words, and the index of the text it stands in."""
        words = [self._words(text) for text in texts]
        runs = [max(0, len(numbers) - RUN_WORDS + 1) for numbers in words]
        owners = np.repeat(np.arange(len(texts)), runs)
        numbers = np.array([number for text in words for number in text], dtype=np.uint64)
        starts = np.cumsum([0, *map(len, words)])[:-1]
        firsts = np.arange(len(owners)) - np.repeat(np.cumsum([0, *runs])[:-1], runs) + np.repeat(starts, runs)
        mixed = _mix(numbers)
        hashes = np.zeros(len(owners), dtype=np.uint64)
        for offset in range(RUN_WORDS):  # a polynomial in an odd number, modulo 2^64
            hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + mixed[firsts + offset]
        return hashes, owners

    def whole(self, texts: Sequence[str]) -> _Hashes:
        """A hash of all words of each text, no run's."""
        return np.array([hash((-1, *self._words(text))) % 2**64 for text in texts], dtype=np.uint64)

    def _words(self, text: str) -> list[int]:
        numbers = self._numbers
        words: Iterable[str] = _WORD.findall(text.lower()) or [text.strip()]  # of emoji and the like the whole is one
        return [numbers.setdefault(word, len(numbers)) for word in words]


def _mix(numbers: NDArray[np.uint64]) -> _Hashes:
    """Numbers spread over 64 bits: the finalizer of SplitMix64 (Steele et al. 2014, figure 8)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
