"""The order of learning: which documents of which source come when. A pure function of texts, weights and seed.

Learning goes in rounds of some batches each. Each source gives to a round its share of the tokens, from where it
stopped in the round before; it goes through its documents in an order drawn anew for each of its own epochs, so that
every document comes once before any comes twice. Within a round all are shuffled. Round r is therefore the same
however long the run will be, whoever asks and whenever: an interrupted run resumes exactly, and one on its plateau may
grow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.training.data import CorpusError

Ids = NDArray[np.uint16]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedSource:
    """The documents of a source, end to end.

    token_ids: all of them; a document begins with the mark that begins a text and ends with the one that ends it.
    starts: where each document begins, and where the last one ends.
    trained: for each token whether predicting it is learned; None for yes.
    repeats: how often a document occurs in an epoch of the mixture.
    """

    token_ids: Ids
    starts: NDArray[np.int64]
    trained: NDArray[np.bool_] | None
    repeats: float

    @property
    def num_predicted(self) -> int:
        """Tokens that are predicted: all but the first of each document."""
        return len(self.token_ids) - (len(self.starts) - 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Up to `sequence_length` tokens of a document and what follows each of them. `trained` may be all true."""

    inputs: Ids
    targets: Ids
    trained: NDArray[np.bool_]


class Mixture:
    """Pieces of documents, round after round.

    Args:
        piece_length: a longer document is cut into pieces of this many predicted tokens.
        round_length: predicted tokens a round.
        seed: draws the orders; with `tag`, which tells the phases of a run apart.

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
        # What a source gives to a round may end in the middle of a piece: so much is drawn more.
        self._slack = sum(int(lengths.max()) for _, lengths in self._pieces)

    @property
    def shares(self) -> list[float]:
        """Each trained source's share of the tokens, in their order."""
        return [float(share) for share in self._shares]

    def round(self, number: int) -> list[Piece]:
        """Round `number`: pieces of at least `round_length` predicted tokens, shuffled."""
        chosen: list[tuple[int, int]] = []
        wanted = self._round_length + self._slack
        for index, share in enumerate(self._shares):
            first, last = (int(share * wanted * turn) for turn in (number, number + 1))
            chosen += [(index, piece) for piece in self._between(index, first, last)]
        order = self._generator(number).permutation(len(chosen))
        return [self._piece(*chosen[place]) for place in order]

    def _between(self, index: int, first: int, last: int) -> list[int]:
        """The pieces of a source that begin at its tokens first to last - 1, counted through all its epochs."""
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
    """Where each piece starts, and how many predicted tokens it has."""
    documents, ends = source.starts[:-1], source.starts[1:] - 1  # the last token is only predicted
    counts = -(-(ends - documents) // piece_length)
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(documents, counts) + nth * piece_length
    return starts, np.minimum(piece_length, np.repeat(ends, counts) - starts)
