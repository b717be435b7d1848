"""Packed layout of a step that holds prompt chunks, for variable-length attention kernels.

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
    """Prompt chunks and decodes of one step. Made once a step, for all layers.

    Attributes:
        decodes: for the B sequences that compute one token: index of the token in T, position, block table (BN).
            None: the step holds no such sequence.
        tokens_X: indices in T of the chunks' tokens.
        slots_S: cache slots of the chunks' contexts, concatenated.
        query_lengths: number of tokens that each chunk computes.
        context_lengths: number of positions of each chunk's sequence, tokens of the chunk included.
        query_starts: int32, C + 1 offsets into X.
        context_starts: int32, C + 1 offsets into S.
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
    """Return the view of a step with at least one chunk, on the device of the block tables."""
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
    # output_size avoids a synchronization with the device (torch.repeat_interleave would read the sum of lengths_C).
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
