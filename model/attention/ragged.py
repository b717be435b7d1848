"""A step that holds prompt chunks, laid out for kernels that take sequences of any length end to end.

Legend: T packed tokens, B sequences that compute one token, C chunks, X packed tokens of chunks, S packed positions of
the chunks' contexts, N blocks of a table.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RaggedView:
    """Made once a step, for all layers.

    decodes: of the sequences that compute one token, their place in T, their position, their block table; None where
        there are none.
    tokens_X: where the chunks' tokens stand in T.
    slots_S: the cache's slots of each chunk's context, end to end.
    query_lengths, context_lengths: of the chunks. query_starts, context_starts: int32, C + 1 offsets into X and S.
    """

    decodes: tuple[Tensor, Tensor, Tensor] | None
    tokens_X: Tensor
    slots_S: Tensor
    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    query_starts: Tensor
    context_starts: Tensor


def ragged_view(
    query_lengths: Sequence[int], context_lengths: Sequence[int], tables_BN: Tensor, block_size: int
) -> RaggedView:
    """The view of a step of at least one chunk, on the tables' device."""
    device = tables_BN.device
    rows = range(len(query_lengths))
    chunks = [row for row in rows if query_lengths[row] > 1]
    singles = [row for row in rows if query_lengths[row] == 1]
    starts = [0, *itertools.accumulate(query_lengths)]
    queries, contexts = ([lengths[row] for row in chunks] for lengths in (query_lengths, context_lengths))
    query_starts, context_starts = ([0, *itertools.accumulate(lengths)] for lengths in (queries, contexts))
    decodes = None
    if singles:
        rows_B, tokens_B, positions_B = torch.tensor(
            [singles, [starts[row] for row in singles], [context_lengths[row] - 1 for row in singles]], device=device
        )
        decodes = tokens_B, positions_B, tables_BN[rows_B]
    rows_C, lengths_C, starts_C = torch.tensor([chunks, contexts, context_starts[:-1]], device=device)
    # With the size told, nothing has to be known of the device.
    chunk_of_S = torch.repeat_interleave(lengths_C, output_size=context_starts[-1])
    positions_S = torch.arange(context_starts[-1], device=device) - starts_C[chunk_of_S]
    blocks_S = tables_BN[rows_C[chunk_of_S], positions_S // block_size]
    return RaggedView(
        decodes=decodes,
        tokens_X=torch.tensor(
            [token for row in chunks for token in range(starts[row], starts[row + 1])], device=device
        ),
        slots_S=blocks_S * block_size + positions_S % block_size,
        query_lengths=tuple(queries),
        context_lengths=tuple(contexts),
        query_starts=torch.tensor(query_starts, dtype=torch.int32, device=device),
        context_starts=torch.tensor(context_starts, dtype=torch.int32, device=device),
    )
