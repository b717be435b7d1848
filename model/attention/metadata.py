"""What attention must know about a packed, ragged batch.

Legend: T packed tokens, B sequences, N blocks of the longest block table, P slots per block.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from model.attention.form import visible


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """One step's batch. Sequence b owns the packed tokens `query_starts[b] : query_starts[b + 1]`, which are the
    last `query_lengths[b]` of its `context_lengths[b]` positions (this step's tokens included).

    Attributes:
        query_lengths, context_lengths: tokens of each sequence, as Python integers.
        positions_T: int64, each token's position in its sequence.
        logit_rows_R: int64, the packed tokens whose logits are wanted, or None for all T.
        slot_mapping_T: int64, where each token's key and value go: block * P + offset. None without a cache.
        block_tables_BN: int64, each sequence's blocks in order, padded with any valid block. None without a cache.

    Raises:
        ValueError: lengths disagree.
    """

    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    positions_T: Tensor
    logit_rows_R: Tensor | None = None
    slot_mapping_T: Tensor | None = None
    block_tables_BN: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.query_lengths) != len(self.context_lengths):
            raise ValueError(f"{len(self.query_lengths)} query lengths, {len(self.context_lengths)} context lengths")
        pairs = zip(self.query_lengths, self.context_lengths, strict=True)
        if any(not 1 <= query <= context for query, context in pairs):
            raise ValueError("every query length must be between 1 and its context length")
        if sum(self.query_lengths) != self.positions_T.shape[0]:
            raise ValueError(f"{sum(self.query_lengths)} query tokens, {self.positions_T.shape[0]} positions")
        if (self.slot_mapping_T is None) != (self.block_tables_BN is None):
            raise ValueError("slot_mapping_T and block_tables_BN come together")

    @functools.cached_property
    def query_starts(self) -> tuple[int, ...]:
        """B + 1 offsets into the packed tokens."""
        return tuple(itertools.accumulate(self.query_lengths, initial=0))

    @functools.cached_property
    def decode_rows(self) -> tuple[int, ...]:
        """The sequences that compute exactly one token: the shape that batched kernels like."""
        return tuple(row for row, length in enumerate(self.query_lengths) if length == 1)

    @functools.cached_property
    def decode_distances_B1S(self) -> Tensor:
        """int64: how far the new token of each of the `decode_rows` is from each position; negative behind its context.

        S is their longest context. Computed once a step, used by every layer.
        """
        lengths = [self.context_lengths[row] for row in self.decode_rows]
        lengths_B = torch.tensor(lengths, device=self.positions_T.device)
        columns_S = torch.arange(max(lengths), device=self.positions_T.device)
        return (lengths_B[:, None] - 1 - columns_S)[:, None]

    def decode_mask(self, window: int | None) -> Tensor:
        """Additive float32 B1S mask of the `decode_rows`: 0 where the window (None: the context) is, else -inf.

        Computed once a step for each window.
        """
        if window not in self._decode_masks:
            distances_B1S = self.decode_distances_B1S
            hidden_B1S = ~visible(distances_B1S, window)
            zeros_B1S = torch.zeros(distances_B1S.shape, device=distances_B1S.device)
            self._decode_masks[window] = zeros_B1S.masked_fill_(hidden_B1S, -torch.inf)
        return self._decode_masks[window]

    @functools.cached_property
    def _decode_masks(self) -> dict[int | None, Tensor]:
        return {}

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes exactly one token."""
        return len(self.query_lengths) == self.positions_T.shape[0]

    def to(self, device: torch.device) -> Self:
        """The same batch with its tensors on `device`; itself if they are there."""
        if self.positions_T.device == device:
            return self
        tensors = {
            name: value.to(device, non_blocking=True)
            for name in ("positions_T", "logit_rows_R", "slot_mapping_T", "block_tables_BN")
            if (value := getattr(self, name)) is not None
        }
        return dataclasses.replace(self, **tensors)

    @classmethod
    def uncached(cls, lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Self:
        """Whole sequences, no cache: what training and the slow twin use."""
        positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])
        return cls(query_lengths=lengths, context_lengths=lengths, positions_T=positions_T)
