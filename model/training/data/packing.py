"""Packed batches: pieces of documents side by side in one row of tokens.

Legend: T tokens of a batch, N + 1 boundaries of its N sequences (each start, and the end of the last).
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.attention.metadata import AttentionMetadata
from model.training.data.mixture import Mixture, Piece

UNTRAINED = -100  # ignored by `cross_entropy`
ROUND_BATCHES = 64


@dataclass(frozen=True, kw_only=True)
class PackedDocuments(AttentionMetadata):
    """Attention metadata of packed documents: a query attends only within its document.

    starts_N: int32, the start of each document, and the end of the last. max_length: upper bound of their lengths.
    """

    starts_N: Tensor
    max_length: int

    @classmethod
    def of(cls, batch: "Batch", max_length: int) -> Self:
        """Return the attention metadata of a batch."""
        length = (len(batch.inputs_T),)
        return cls(
            query_lengths=length,
            context_lengths=length,
            positions_T=batch.positions_T,
            starts_N=batch.starts_N,
            max_length=max_length,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Packed token ids of one training step.

    inputs_T, targets_T: int64 token ids; a target outside the loss mask is UNTRAINED. positions_T: int64, the position
    of each token in its sequence. starts_N: int32, see `PackedDocuments`.
    """

    inputs_T: Tensor
    targets_T: Tensor
    positions_T: Tensor
    starts_N: Tensor

    def to(self, device: str) -> Self:
        """Copy the batch to a device."""
        return type(self)(
            inputs_T=self.inputs_T.to(device, non_blocking=True),
            targets_T=self.targets_T.to(device, non_blocking=True),
            positions_T=self.positions_T.to(device, non_blocking=True),
            starts_N=self.starts_N.to(device, non_blocking=True),
        )


class Batches:
    """Batches of a mixture, by number. Only the current round is kept in memory.

    If `documents` is true, each piece is a separate sequence, cut where a batch ends. Otherwise the pieces of a round
    form one stream, which is cut into rows of `sequence_length` and shuffled.
    """

    def __init__(self, mixture: Mixture, *, sequence_length: int, batch_size: int, documents: bool) -> None:
        self._mixture = mixture
        self._sequence_length = sequence_length
        self._batch_tokens = sequence_length * batch_size
        self._documents = documents
        self._round: tuple[int, _Stream] | None = None

    def batch(self, number: int) -> Batch:
        """Return batch `number`, of `sequence_length * batch_size` tokens."""
        turn, place = divmod(number, ROUND_BATCHES)
        if self._round is None or self._round[0] != turn:
            self._round = turn, self._make_round(turn)
        stream = self._round[1]
        first, last = place * self._batch_tokens, (place + 1) * self._batch_tokens
        inside = stream.starts[(stream.starts > first) & (stream.starts < last)]
        starts = np.concatenate([[0], inside - first, [self._batch_tokens]])
        lengths = np.diff(starts)
        targets = np.where(stream.trained[first:last], stream.targets[first:last].astype(np.int64), UNTRAINED)
        return Batch(
            inputs_T=torch.from_numpy(stream.inputs[first:last].astype(np.int64)),
            targets_T=torch.from_numpy(targets),
            positions_T=torch.from_numpy(np.arange(self._batch_tokens) - np.repeat(starts[:-1], lengths)),
            starts_N=torch.from_numpy(starts.astype(np.int32)),
        )

    def _make_round(self, number: int) -> "_Stream":
        pieces = self._mixture.round(number)
        wanted = ROUND_BATCHES * self._batch_tokens
        stream = _Stream.of(pieces)
        if self._documents:
            return stream
        rows = wanted // self._sequence_length
        order = np.random.Generator(np.random.Philox(key=[number, rows])).permutation(rows)

        def shuffled(values: NDArray[np.generic]) -> NDArray[np.generic]:
            return values[:wanted].reshape(rows, self._sequence_length)[order].reshape(-1)

        return _Stream(
            inputs=shuffled(stream.inputs),
            targets=shuffled(stream.targets),
            trained=shuffled(stream.trained),
            starts=np.arange(rows) * self._sequence_length,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stream:
    """Concatenated pieces of a round, and the start of each piece."""

    inputs: NDArray[np.generic]
    targets: NDArray[np.generic]
    trained: NDArray[np.generic]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, pieces: list[Piece]) -> Self:
        lengths = [len(piece.inputs) for piece in pieces]
        return cls(
            inputs=np.concatenate([piece.inputs for piece in pieces]),
            targets=np.concatenate([piece.targets for piece in pieces]),
            trained=np.concatenate([piece.trained for piece in pieces]),
            starts=np.cumsum([0, *lengths[:-1]]),
        )
