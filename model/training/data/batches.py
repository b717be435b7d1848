"""Batches of a training run: a batch is a pure function of the texts, their weights, the seed and the batch's number.

A round is ROUND_BATCHES consecutive batches. Each source fills its share of the round's tokens, and continues in the
next round where it stopped. A source is shuffled for each of its epochs. A round does not depend on the length of the
run or on earlier calls, so an interrupted run resumes with the same batches, and a run can be lengthened.

Legend: T tokens of a batch, N + 1 boundaries of its N sequences (start of each sequence, and end of the last one).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.attention.metadata import AttentionMetadata

UNTRAINED = -100  # ignored by `cross_entropy`
ROUND_BATCHES = 64

Ids = NDArray[np.uint16]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedSource:
    """Token ids of all documents of a source, concatenated. Each document begins with BOS and ends with a second BOS.

    starts: offset of each document in `token_ids`, and the end of the last one. trained: loss mask, True for each token
    to predict. repeats: occurrences of each document in an epoch of the mixture.
    """

    token_ids: Ids
    starts: NDArray[np.int64]
    trained: NDArray[np.bool_]
    repeats: float

    @property
    def num_predicted(self) -> int:
        """Number of tokens to predict: all but the first token of each document."""
        return len(self.token_ids) - (len(self.starts) - 1)


class Piece(NamedTuple):
    """Part of a document: input token ids, and the token id to predict after each, UNTRAINED outside the loss mask."""

    inputs: Ids
    targets: NDArray[np.int64]


class Mixture:
    """Weighted mixture of tokenized sources, as rounds of shuffled pieces of documents.

    piece_length, round_length and epoch_length are numbers of predicted tokens. tag: part of the seed.

    Raises:
        ValueError: the sources have no tokens to predict.
    """

    def __init__(
        self, sources: Sequence[TokenizedSource], *, piece_length: int, round_length: int, seed: int, tag: int
    ) -> None:
        self._sources = [source for source in sources if source.repeats > 0 and source.num_predicted > 0]
        if not self._sources:
            raise ValueError("corpus: there is no text to learn from; give more text, or hold out less of it")
        self._round_length = round_length
        self._seed = (seed, tag)
        weights = np.array([source.repeats * source.num_predicted for source in self._sources])
        self.shares = weights / weights.sum()  # of the tokens, in source order, without unused sources
        self.epoch_length = int(weights.sum())
        self._pieces = [_cut(source, piece_length) for source in self._sources]
        # The share of a source may end in the middle of a piece: each round takes this many extra tokens.
        self._slack = sum(int(lengths.max()) for _, lengths in self._pieces)

    def round(self, number: int) -> list[Piece]:
        """Return the shuffled pieces of round `number`, which predict at least `round_length` tokens in total."""
        chosen: list[tuple[int, int]] = []
        wanted = self._round_length + self._slack
        for index, share in enumerate(self.shares):
            first, last = (int(share * wanted * turn) for turn in (number, number + 1))
            chosen += [(index, piece) for piece in self._pieces_between(index, first, last)]
        order = self._generator(number).permutation(len(chosen))
        return [self._piece(*chosen[place]) for place in order]

    def _pieces_between(self, index: int, first: int, last: int) -> list[int]:
        """Return which pieces of a source start at its predicted tokens `first` to `last` - 1, counted across epochs.

        index: index of the source. The result holds indices of pieces.
        """
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
        start, end = starts[piece], starts[piece] + lengths[piece]
        targets = source.token_ids[start + 1 : end + 1].astype(np.int64)
        targets[~source.trained[start + 1 : end + 1]] = UNTRAINED
        return Piece(source.token_ids[start:end], targets)

    def _generator(self, *path: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([*self._seed, len(path), *path])))


def _cut(source: TokenizedSource, piece_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut the documents of a source into pieces. Return each piece's offset and number of predicted tokens."""
    documents, ends = source.starts[:-1], source.starts[1:] - 1  # the last token is only predicted
    counts = -(-(ends - documents) // piece_length)
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(documents, counts) + nth * piece_length
    return starts, np.minimum(piece_length, np.repeat(ends, counts) - starts)


class Batch(NamedTuple):
    """Packed token ids of one training step. targets_T: token id to predict after each input, or UNTRAINED.

    positions_T: position of each token in its sequence. starts_N: index of each sequence's first token, and T (int32).
    """

    inputs_T: Tensor
    targets_T: Tensor
    positions_T: Tensor
    starts_N: Tensor

    def to(self, device: str) -> Self:
        return type(self)(*(tensor.to(device, non_blocking=True) for tensor in self))


@dataclass(frozen=True, kw_only=True)
class PackedDocuments(AttentionMetadata):
    """Attention metadata of a batch of packed documents, in which a token attends within its own document."""

    starts_N: Tensor  # see `attend_documents`
    max_length: int  # upper bound of a document's length, in tokens

    @classmethod
    def of(cls, batch: Batch, max_length: int) -> Self:
        length = (len(batch.inputs_T),)
        return cls(
            query_lengths=length,
            context_lengths=length,
            positions_T=batch.positions_T,
            starts_N=batch.starts_N,
            max_length=max_length,
        )


class Batches:
    """Batches of a mixture, by number. The tokens of the current round are kept in memory.

    documents: if True, each piece is a separate sequence, cut where a batch ends. If False, the pieces of a round are
    joined and cut into sequences of `sequence_length` tokens, which are shuffled.
    """

    def __init__(self, mixture: Mixture, *, sequence_length: int, batch_size: int, documents: bool) -> None:
        self.mixture = mixture
        self._sequence_length = sequence_length
        self._batch_tokens = sequence_length * batch_size
        self._documents = documents
        self._round_number = -1

    def batch(self, number: int) -> Batch:
        turn, place = divmod(number, ROUND_BATCHES)
        if turn != self._round_number:
            self._start_round(turn)
        first, last = place * self._batch_tokens, (place + 1) * self._batch_tokens
        inside = self._starts[(self._starts > first) & (self._starts < last)]
        starts = np.concatenate([[0], inside - first, [self._batch_tokens]])
        positions = np.arange(self._batch_tokens) - np.repeat(starts[:-1], np.diff(starts))
        return Batch(
            inputs_T=torch.from_numpy(self._inputs[first:last].astype(np.int64)),
            targets_T=torch.from_numpy(self._targets[first:last]),
            positions_T=torch.from_numpy(positions),
            starts_N=torch.from_numpy(starts.astype(np.int32)),
        )

    def _start_round(self, number: int) -> None:
        pieces = self.mixture.round(number)
        inputs = np.concatenate([piece.inputs for piece in pieces])
        targets = np.concatenate([piece.targets for piece in pieces])
        starts = np.cumsum([0, *(len(piece.inputs) for piece in pieces)])[:-1]
        if not self._documents:
            length, wanted = self._sequence_length, ROUND_BATCHES * self._batch_tokens
            rows = wanted // length
            order = np.random.Generator(np.random.Philox(key=[number, rows])).permutation(rows)
            inputs, targets = (x[:wanted].reshape(rows, length)[order].reshape(-1) for x in (inputs, targets))
            starts = np.arange(rows) * length
        self._inputs, self._targets, self._starts = inputs, targets, starts
        self._round_number = number
