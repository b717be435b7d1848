"""Inputs of decode steps, updated in place while the same sequences continue from step to step.

Such a step differs from the previous step only in token ids, positions and a few new blocks. Building its tensors anew
takes several times as long as an update. A forward pass evicts everything else from the CPU's caches, so a PyTorch
operation after it takes ten times as long as in a tight loop.

Legend: T packed tokens, B sequences, N blocks of the longest table.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.attention.metadata import AttentionMetadata
from service.engine.execution.grammar_masks import Masks
from service.engine.execution.model_inputs import ModelInputs, build_inputs, forbidden_ids
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.sequence import SequenceState
from service.engine.scheduling.step_plan import Chunk, StepPlan


@dataclass(slots=True)
class _Kept:
    """Inputs and sequences of the previous decode step.

    Attributes:
        inputs: inputs of the previous step. The arrays below are views of its tensors, without the rows of padding.
        sequences: sequences in the order of their rows.
        tables: block table of each sequence. A different list object means that the sequence was preempted since.
        contexts: number of tokens of each sequence once the previous step is computed.
        has_constraints: some sequence may have forbidden tokens in this or a later step.
    """

    inputs: ModelInputs
    sequences: list[SequenceState]
    tables: list[list[int]]
    contexts: list[int]
    min_rows: int
    has_constraints: bool
    ids_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    slots_T: NDArray[np.int64]
    tables_TN: NDArray[np.int64]
    contexts_B: NDArray[np.int64]


class DecodeInputs:
    """Cached equivalent of `build_inputs`: reuses the tensors of the previous decode step if possible.

    The returned inputs are valid until the next call of `build`, which may overwrite their tensors.
    """

    def __init__(self, scheduler: Scheduler, *, block_size: int, scratch_block: int) -> None:
        self._scheduler = scheduler
        self._block_size, self._scratch_block = block_size, scratch_block
        self._kept: _Kept | None = None

    def build(self, plan: StepPlan, *, min_rows: int, masks: Masks | None = None) -> ModelInputs:
        """Return the same inputs as `build_inputs`."""
        kept, chunks = self._kept, plan.chunks
        if kept is not None and plan.is_decode and kept.min_rows == min_rows and self._goes_on(kept, chunks):
            return self._moved_on(kept, plan.previous_rows, masks)
        inputs = build_inputs(
            plan,
            self._scheduler,
            block_size=self._block_size,
            scratch_block=self._scratch_block,
            min_rows=min_rows,
            masks=masks,
        )
        self._kept = _keep(inputs, chunks, min_rows) if plan.is_decode else None
        return inputs

    def _goes_on(self, kept: _Kept, chunks: tuple[Chunk, ...]) -> bool:
        """Return True if these are the same sequences, one token later, whose block tables need no more columns."""
        return (
            [chunk.start for chunk in chunks] == kept.contexts
            and [chunk.sequence for chunk in chunks] == kept.sequences
            and all(sequence.block_table is table for sequence, table in zip(kept.sequences, kept.tables, strict=True))
            and max(kept.contexts) < kept.tables_TN.shape[1] * self._block_size
        )

    def _moved_on(self, kept: _Kept, previous_rows: tuple[int, ...], masks: Masks | None) -> ModelInputs:
        size, sequences = self._block_size, kept.sequences
        kept.ids_T[:] = 0 if previous_rows else [sequence.token_ids[-1] for sequence in sequences]
        kept.positions_T += 1
        kept.slots_T += 1
        kept.contexts_B += 1
        for row, position in enumerate(kept.contexts):
            if position % size == 0:
                block = kept.tables[row][position // size]
                kept.tables_TN[row, position // size], kept.slots_T[row] = block, block * size
        kept.contexts = [context + 1 for context in kept.contexts]
        before, positions = kept.inputs, tuple(kept.contexts)
        num_rows = len(before.metadata.query_lengths)
        kept.inputs = ModelInputs(
            token_ids_T=before.token_ids_T,
            metadata=AttentionMetadata(
                query_lengths=before.metadata.query_lengths,
                context_lengths=positions + (1,) * (num_rows - len(positions)),
                positions_T=before.metadata.positions_T,
                slot_mapping_T=before.metadata.slot_mapping_T,
                block_tables_BN=before.metadata.block_tables_BN,
                contexts_B=before.metadata.contexts_B,
            ),
            params=before.params,
            all_greedy=before.all_greedy,
            wants_logprobs=before.wants_logprobs,
            positions=positions,
            forbidden=forbidden_ids(self._scheduler, sequences) if kept.has_constraints else (),
            rules=before.rules,
            prompt_rows=(),
            masks=masks,
            previous_rows=previous_rows,
        )
        return kept.inputs


def _keep(inputs: ModelInputs, chunks: tuple[Chunk, ...], min_rows: int) -> _Kept:
    metadata, count = inputs.metadata, len(chunks)
    assert metadata.slot_mapping_T is not None
    assert metadata.block_tables_BN is not None
    assert metadata.contexts_B is not None
    sequences = [chunk.sequence for chunk in chunks]
    return _Kept(
        inputs=inputs,
        sequences=sequences,
        tables=[sequence.block_table for sequence in sequences],
        contexts=list(inputs.positions),
        min_rows=min_rows,
        # After min_tokens, only rules forbid tokens.
        has_constraints=any(s.rules is not None or s.num_completion_tokens < s.params.min_tokens for s in sequences),
        ids_T=inputs.token_ids_T.numpy()[:count],
        positions_T=metadata.positions_T.numpy()[:count],
        slots_T=metadata.slot_mapping_T.numpy()[:count],
        tables_TN=metadata.block_tables_BN.numpy()[:count],
        contexts_B=metadata.contexts_B.numpy()[:count],
    )
