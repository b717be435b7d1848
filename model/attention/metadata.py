"""Arguments of attention backends: a layer's parameters (`AttentionForm`), a step's batch (`AttentionMetadata`).

Legend: T packed tokens, B sequences, Q query tokens of a sequence, S its context, H query heads, K key/value heads,
D head dimension, N blocks of the longest block table, P slots per block, C prompt chunks, X packed tokens of chunks.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.system.device_copy import copy_to_device

# Position bias of `model.attention.score_biases`: (q_BQHD, k_BSKD, distances_BQS) -> BHQS, added to the scaled
# scores; 1HQS if the bias is equal for all sequences. Distances are int64, query position - key position. Their B is 1
# if all sequences have the same distances. Any finite bias is allowed for negative distances, which are masked later.
ScoreBias = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class AttentionForm:
    """Attention parameters of one layer.

    window: number of positions that a token sees, its own included; None: all.
    soft_cap: bound of the scores, see `soft_cap`; None: no bound.
    is_written: the layer itself writes its keys and values to a KV-cache, before the backend runs.
    """

    layer: int
    scale: float
    window: int | None
    bias: ScoreBias | None
    soft_cap: float | None = None
    is_written: bool = False


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Bound numbers smoothly: cap * tanh(x / cap), which is about x for small x (Gemma 2, arXiv 2408.00118)."""
    return cap * torch.tanh(x / cap)


def visible(distances: Tensor, window: int | None) -> Tensor:
    """Return a mask, true where a query sees a key, from distances (query position - key position) and the window."""
    if window is None:
        return distances >= 0
    return (distances >= 0) & (distances < window)


@dataclass(frozen=True, kw_only=True)
class DecodeView:
    """KV-cache slots that a step reads for its decoding sequences, which compute one new token each.

    Each sequence has S slots, from the start of the first block that its window reaches.

    slots_BS: int64 slot numbers. In place of a slot that the token does not see stands the new token's own slot,
        because a hidden slot may hold NaN of another sequence.
    distances_B1S: int64, position of the new token - position of the slot; negative after the end of the context.
    mask_B1S: float32 mask to add to the scores: 0 for visible slots, -inf for hidden slots.
    """

    slots_BS: Tensor
    distances_B1S: Tensor
    mask_B1S: Tensor


@dataclass(frozen=True, kw_only=True)
class RaggedView:
    """Layout of an engine step with C prompt chunks (several tokens of one sequence) and possibly decodes.

    decodes: of the B sequences that compute one token: index of the token in the packed batch, its position, and block
        tables (BN). None without such sequences.
    tokens_X: indices in the packed batch of the chunks' tokens.
    query_lengths: number of tokens of each chunk.
    context_lengths: number of positions of each chunk's sequence up to the end of the chunk.
    query_starts, context_starts: int32, C + 1 starts: of the chunks in tokens_X, and of the contexts in `chunk_slots`.

    Indices of adjacent tokens are a slice, which takes no copy.
    """

    decodes: tuple[Tensor | slice, Tensor, Tensor] | None
    tokens_X: Tensor | slice
    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    query_starts: Tensor
    context_starts: Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """Sequences of one engine step: their lengths, and where their keys and values lie in the KV-cache.

    Sequence b owns the packed tokens `query_starts[b] : query_starts[b + 1]`. These tokens are the last
    `query_lengths[b]` of the sequence's `context_lengths[b]` positions.

    positions_T: int64, each token's position in its sequence.
    logit_rows_R: int64, indices of the packed tokens that need logits; None: all T.
    slot_mapping_T: int64, cache slot of each token's key and value: block * P + offset. None without a cache.
    block_tables_BN: each sequence's blocks in order, padded with any valid block. None without a cache. int64 on a CPU;
        int32 on a GPU, where each step copies them.
    contexts_B: `context_lengths` as an int64 tensor on the host; None: made from `context_lengths` when needed.

    Raises:
        ValueError: the lengths of the arguments are inconsistent.
    """

    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    positions_T: Tensor
    logit_rows_R: Tensor | None = None
    slot_mapping_T: Tensor | None = None
    block_tables_BN: Tensor | None = None
    contexts_B: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.query_lengths) != len(self.context_lengths):
            raise ValueError("query_lengths and context_lengths must each have one number per sequence of the step")
        if min(self.query_lengths, default=1) < 1 or any(map(operator.gt, self.query_lengths, self.context_lengths)):
            raise ValueError("each of query_lengths must be from 1 to the same sequence's number in context_lengths")
        if sum(self.query_lengths) != self.positions_T.shape[0]:
            num_positions = self.positions_T.shape[0]
            raise ValueError(
                f"positions_T has {num_positions} positions, but query_lengths sum to {sum(self.query_lengths)}"
            )
        if (self.slot_mapping_T is None) != (self.block_tables_BN is None):
            raise ValueError("slot_mapping_T and block_tables_BN must both be given (with a KV-cache) or both be None")

    @functools.cached_property
    def query_starts(self) -> tuple[int, ...]:
        """Return the index of each sequence's first token in the packed batch, then the batch's number of tokens."""
        return tuple(itertools.accumulate(self.query_lengths, initial=0))

    @functools.cached_property
    def decode_rows(self) -> tuple[int, ...]:
        """Return the indices of the sequences that compute exactly one token."""
        return tuple(row for row, length in enumerate(self.query_lengths) if length == 1)

    @functools.cached_property
    def kernel_arguments(self) -> dict[object, Any]:
        """Return this step's dict of values that are the same for all layers, such as kernel arguments."""
        return {}

    def decode_view(self, window: int | None, block_size: int) -> DecodeView:
        """Return the cache slots that decoding sequences read. Computed once per step for each window, then reused."""
        key = "decodes", window, block_size
        if key not in self.kernel_arguments:
            self.kernel_arguments[key] = self._make_decode_view(window, block_size)
        view: DecodeView = self.kernel_arguments[key]
        return view

    @functools.cached_property
    def ragged_view(self) -> RaggedView:
        """Layout of a step with at least one prompt chunk, computed once for all layers."""
        assert self.block_tables_BN is not None
        (singles_2B, _, tokens, *_), (copied_2B, _, tokens_X, query_starts, context_starts) = self._layout()
        decodes = None
        if self.decode_rows:
            rows_B, tokens_B = copied_2B
            # Copies: a kernel would be compiled again for slices, whose addresses are no multiples of 16.
            decodes = _indices(singles_2B[1], tokens_B), self.positions_T[tokens_B], self.block_tables_BN[rows_B]
        pairs = list(zip(self.query_lengths, self.context_lengths, strict=True))
        queries, contexts = zip(*((query, context) for query, context in pairs if query > 1), strict=True)
        return RaggedView(
            decodes=decodes,
            tokens_X=_indices(tokens, tokens_X),
            query_lengths=queries,
            context_lengths=contexts,
            query_starts=query_starts,
            context_starts=context_starts,
        )

    def chunk_slots(self, block_size: int) -> Tensor:
        """Return the cache slots S of the contexts of a `RaggedView`, one context after the other. Computed once."""
        key = "chunk slots", block_size
        if key not in self.kernel_arguments:
            assert self.block_tables_BN is not None
            _, (_, (rows_C, lengths_C, starts_C), *_) = self._layout()
            num_slots = sum(self.ragged_view.context_lengths)
            # output_size avoids a synchronization with the device: repeat_interleave would read the sum of lengths_C.
            chunk_of_S = torch.repeat_interleave(lengths_C, output_size=num_slots)
            positions_S = torch.arange(num_slots, device=starts_C.device) - starts_C[chunk_of_S]
            blocks_S = self.block_tables_BN[rows_C[chunk_of_S], positions_S // block_size]
            self.kernel_arguments[key] = blocks_S * block_size + positions_S % block_size
        slots_S: Tensor = self.kernel_arguments[key]
        return slots_S

    def _make_decode_view(self, window: int | None, block_size: int) -> DecodeView:
        assert self.block_tables_BN is not None
        device = self.positions_T.device
        lengths = [self.context_lengths[row] for row in self.decode_rows]
        firsts = [0 if window is None else max(0, length - window) // block_size for length in lengths]
        width = max(length - first * block_size for length, first in zip(lengths, firsts, strict=True))
        lasts = [length - 1 - first * block_size for length, first in zip(lengths, firsts, strict=True)]
        (numbers_3B,) = copy_to_device(device, [np.array([self.decode_rows, firsts, lasts])])
        rows_B, firsts_B, lasts_B = numbers_3B
        blocks = firsts_B[:, None] + torch.arange(-(-width // block_size), device=device)
        tables_BN = self.block_tables_BN if self.is_decode else self.block_tables_BN[rows_B]
        tables_BN = tables_BN.gather(1, blocks.clamp(max=tables_BN.shape[1] - 1))
        slots_BS = (tables_BN[:, :, None] * block_size + torch.arange(block_size, device=device)).flatten(1)[:, :width]
        distances_BS = lasts_B[:, None] - torch.arange(width, device=device)
        visible_BS = visible(distances_BS, window)
        own_B1 = slots_BS.gather(1, lasts_B[:, None])
        mask_BS = torch.zeros(distances_BS.shape, device=device).masked_fill_(~visible_BS, -torch.inf)
        return DecodeView(
            slots_BS=torch.where(visible_BS, slots_BS, own_B1),
            distances_B1S=distances_BS[:, None],
            mask_B1S=mask_BS[:, None],
        )

    def _ragged_layout(self) -> list[NDArray[np.int64] | NDArray[np.int32]]:
        """Return the integers of a `RaggedView` that the host knows.

        The arrays are 2B (row and token of each decode), 3C (row, context length and start of context of each
        chunk), `tokens_X`, `query_starts` and `context_starts`.
        """
        starts, singles = self.query_starts, self.decode_rows
        chunks = [row for row, length in enumerate(self.query_lengths) if length > 1]
        queries, contexts = ([lengths[row] for row in chunks] for lengths in (self.query_lengths, self.context_lengths))
        query_starts, context_starts = ([0, *itertools.accumulate(lengths)] for lengths in (queries, contexts))
        return [
            np.array([singles, [starts[row] for row in singles]], dtype=np.int64),
            np.array([chunks, contexts, context_starts[:-1]], dtype=np.int64),
            np.concatenate([np.arange(starts[row], starts[row + 1]) for row in chunks]),
            np.array(query_starts, dtype=np.int32),
            np.array(context_starts, dtype=np.int32),
        ]

    def _layout(self) -> tuple[Sequence[NDArray[Any]], Sequence[Tensor]]:
        """Return `_ragged_layout` on the host, and on the device of the metadata. Copied once for all layers."""
        if "layout" not in self.kernel_arguments:
            arrays = self._ragged_layout()
            self.kernel_arguments["layout"] = arrays, copy_to_device(self.positions_T.device, arrays)
        layout: tuple[Sequence[NDArray[Any]], Sequence[Tensor]] = self.kernel_arguments["layout"]
        return layout

    @property
    def is_decode(self) -> bool:
        """Return whether every sequence of the step computes exactly one token."""
        return len(self.query_lengths) == self.positions_T.shape[0]

    def to(self, device: torch.device) -> Self:
        """Return the same metadata with tensors on `device`; `contexts_B` stays on the host."""
        return self.to_device(device, [])[0]

    def to_device(self, device: torch.device, others: Sequence[NDArray[Any]]) -> tuple[Self, list[Tensor]]:
        """Return the metadata and other arrays of the host on `device`, by one asynchronous copy for all."""
        if self.positions_T.device == device:
            return self, copy_to_device(device, others)
        names = ("positions_T", "logit_rows_R", "slot_mapping_T", "block_tables_BN")
        given = {name: value.numpy() for name in names if (value := getattr(self, name)) is not None}
        if self.block_tables_BN is not None:
            given["block_tables_BN"] = given["block_tables_BN"].astype(np.int32)
        layout = [] if self.is_decode or self.block_tables_BN is None else self._ragged_layout()
        copies = copy_to_device(device, [*given.values(), *others, *layout])
        moved: dict[str, Any] = dict(zip(given, copies, strict=False))
        metadata = dataclasses.replace(self, **moved)
        if layout:
            metadata.kernel_arguments["layout"] = layout, copies[len(given) + len(others) :]
        return metadata, copies[len(given) : len(given) + len(others)]

    @classmethod
    def uncached(cls, lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Self:
        """Return the metadata of a step over whole sequences of these lengths, without a KV-cache, as in training."""
        positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])
        return cls(query_lengths=lengths, context_lengths=lengths, positions_T=positions_T)


def _indices(known: NDArray[np.int64], copied: Tensor) -> Tensor | slice:
    """Return ascending indices: as a slice if they are adjacent, else their copy on the device."""
    first, last = int(known[0]), int(known[-1])
    return slice(first, last + 1) if last - first + 1 == len(known) else copied
