"""Training order of the documents of all sources, a pure function of texts, weights and seed.

Training proceeds in rounds of several batches. Each source contributes its share of the tokens to a round, starting
where the previous round stopped. A source is shuffled again for each of its epochs, so every document occurs once
before any occurs twice. The pieces within a round are shuffled too. Round r does not depend on the length of the run or
on earlier calls. An interrupted run can therefore resume exactly, and a run on its plateau can be lengthened.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.training.data.sources import CorpusError

Ids = NDArray[np.uint16]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedSource:
    """Concatenated tokens of a source.

    token_ids: the tokens of all documents; a document starts and ends with `bos_token_id`.
    starts: offset of each document, and the end of the last document.
    trained: loss mask per token; None for all tokens.
    repeats: number of times a document occurs in an epoch of the mixture.
    """

    token_ids: Ids
    starts: NDArray[np.int64]
    trained: NDArray[np.bool_] | None
    repeats: float

    @property
    def num_predicted(self) -> int:
        """Number of predicted tokens: all but the first of each document."""
        return len(self.token_ids) - (len(self.starts) - 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a document: inputs, the next token of each input, and the loss mask of these targets."""

    inputs: Ids
    targets: Ids
    trained: NDArray[np.bool_]


class Mixture:
    """Weighted mixture of sources, as rounds of pieces of documents.

    Args:
        piece_length: a longer document is cut into pieces of this many predicted tokens.
        round_length: predicted tokens per round.
        seed: seed of the shuffles.
        tag: number of the phase, which is mixed into the seed.

    Raises:
        CorpusError: there are no tokens.
    """

    def __init__(
        self, sources: Sequence[TokenizedSource], *, piece_length: int, round_length: int, seed: int, tag: int
    ) -> None:
        self._sources = [source for source in sources if source.repeats > 0 and source.num_predicted > 0]
        if not self._sources:
            raise CorpusError("there is no text to learn from; give more, or hold out less")
        self._round_length = round_length
        self._seed = (seed, tag)
        weights = np.array([source.repeats * source.num_predicted for source in self._sources])
        self._shares = weights / weights.sum()
        self.epoch_length = int(weights.sum())
        self._pieces = [_cut(source, piece_length) for source in self._sources]
        # The share of a source may end in the middle of a piece: each round takes this many extra tokens.
        self._slack = sum(int(lengths.max()) for _, lengths in self._pieces)

    @property
    def shares(self) -> list[float]:
        """Share of the tokens of each trained source, in source order."""
        return [float(share) for share in self._shares]

    def round(self, number: int) -> list[Piece]:
        """Return the shuffled pieces of round `number`, with at least `round_length` predicted tokens in total."""
        chosen: list[tuple[int, int]] = []
        wanted = self._round_length + self._slack
        for index, share in enumerate(self._shares):
            first, last = (int(share * wanted * turn) for turn in (number, number + 1))
            chosen += [(index, piece) for piece in self._between(index, first, last)]
        order = self._generator(number).permutation(len(chosen))
        return [self._piece(*chosen[place]) for place in order]

    def _between(self, index: int, first: int, last: int) -> list[int]:
        """Return the pieces of a source that start at token `first` to `last` - 1, counted across its epochs."""
        _, lengths = self._pieces[index]
        total = int(lengths.sum())
        pieces: list[int] = []
        for epoch in range(first // total, (last - 1) // total + 1 if last > first else 0):
            order = self._generator(epoch, index).permutation(len(lengths))
            begins = np.cumsum(lengths[order]) - lengths[order] + epoch * total
            pieces += order[(begins >= first) & (begins < last)].tolist()
        return pieces

    def _piece(self, index: int, piece: int) -> Piece:
        source, (starts, lengths) = self._sources[index], self._pieces[index]
        start, length = starts[piece], lengths[piece]
        targets = slice(start + 1, start + length + 1)
        trained = np.ones(length, dtype=np.bool_) if source.trained is None else source.trained[targets]
        return Piece(source.token_ids[start : start + length], source.token_ids[targets], trained)

    def _generator(self, *path: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([*self._seed, len(path), *path])))


def _cut(source: TokenizedSource, piece_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the start of each piece and its number of predicted tokens."""
    documents, ends = source.starts[:-1], source.starts[1:] - 1  # the last token is only predicted
    counts = -(-(ends - documents) // piece_length)
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(documents, counts) + nth * piece_length
    return starts, np.minimum(piece_length, np.repeat(ends, counts) - starts)
