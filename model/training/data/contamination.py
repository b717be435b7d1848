"""Decontamination: removal of training documents that share a run of words with a held-out document.

Words are compared without case, punctuation and spaces. A shared run of RUN_WORDS words indicates a quotation. Runs of
13 words are common in the literature (Brown et al. 2020, arXiv 2005.14165, appendix C). They are too short here: an
encyclopedia repeats longer phrases in its articles on villages.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from model.training.data.sources import Document, Source

RUN_WORDS = 20
_WORD = re.compile(r"[^\W_]+")
_Hashes = NDArray[np.uint64]


def leave_out_held_out(sources: Sequence[Source]) -> list[Source]:
    """Remove training documents that share RUN_WORDS consecutive words with a held-out text of any source.

    Texts with fewer words are compared as a whole.
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
    """Hashes of runs of words. Words are numbered in order of first occurrence."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def hashes(self, texts: Sequence[str]) -> tuple[_Hashes, NDArray[np.int64]]:
        """Return the hash of each run of RUN_WORDS words, and the index of its text."""
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
        """Return a hash of all words of each text, distinct from the hashes of runs."""
        return np.array([hash((-1, *self._words(text))) % 2**64 for text in texts], dtype=np.uint64)

    def _words(self, text: str) -> list[int]:
        numbers = self._numbers
        words: Iterable[str] = _WORD.findall(text.lower()) or [text.strip()]  # a text of emoji only counts as one word
        return [numbers.setdefault(word, len(numbers)) for word in words]


def _mix(numbers: NDArray[np.uint64]) -> _Hashes:
    """Hash numbers to 64 bits with the finalizer of SplitMix64 (Steele et al. 2014, figure 8)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
