"""Inputs of one forward pass: the tensors of a `StepPlan`.

While the same sequences decode from step to step, only token ids, positions and a few new blocks change. `InputBuilder`
then updates the tensors of the previous step in place. Building tensors anew takes several times as long, because a
forward pass evicts everything else from the CPU's caches.

Legend: T packed tokens, B sequences, N entries of the longest block table, R packed tokens whose logits are computed.
A row of a forward pass has one block table. A row is a sequence, a draft token or padding.
"""

from operator import is_

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.attention.metadata import AttentionMetadata
from model.sampling.params import SamplingParams
from model.sampling.token_constraints import TokenRules
from service.engine.execution.grammar_masks import Masks
from service.engine.scheduling.step_plan import Chunk, StepPlan


class ModelInputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Inputs of one forward pass, and of sampling one token from each of the first `len(params)` rows of logits."""

    token_ids_T: Tensor  # packed token ids; 0 for the tokens of `previous_rows`
    metadata: AttentionMetadata
    params: tuple[SamplingParams, ...]
    all_greedy: bool
    wants_logprobs: bool  # some of `params` request logprobs
    positions: tuple[int, ...]
    forbidden: tuple[tuple[int, ...], ...]  # forbidden token ids of each sampled row; empty if no row has any
    rules: tuple[TokenRules | None, ...]  # of each sampled row, changed by the step's commit; empty if no row has any
    prompt_rows: tuple[tuple[Chunk, int], ...]  # chunks whose prompt is scored, each with its first logit row
    masks: Masks | None = None
    pooled_rows: tuple[tuple[Chunk, int], ...] = ()  # chunks to pool, each with its first packed token to pool
    # Rows of the previous step whose sampled tokens are the first token ids: only the device knows these tokens yet.
    previous_rows: tuple[int, ...] = ()
    # Key of the LoRA adapter (empty: the base model) and number of packed tokens of each chunk; empty if no chunk has
    # one. The same object while the same sequences decode.
    adapters: tuple[tuple[str, int], ...] = ()


def _pack_tokens(plan: StepPlan, min_rows: int) -> tuple[list[int], list[int], list[int]]:
    """Return three lists: the query and context lengths of a forward pass's rows, and its token ids, with padding."""
    lengths: list[int] = []
    contexts: list[int] = []
    token_ids = [0] * len(plan.previous_rows)
    for chunk in plan.chunks:
        known, num_drafts = chunk.num_known_tokens, len(chunk.draft)
        lengths += [known - chunk.start, *[1] * num_drafts]
        contexts += range(known, known + 1 + num_drafts)
        token_ids += chunk.token_ids
        token_ids += chunk.draft
    num_padding = max(0, min_rows - len(token_ids))
    return lengths + [1] * num_padding, contexts + [1] * num_padding, token_ids + [0] * num_padding


def _block_tables(
    chunks: tuple[Chunk, ...], contexts: list[int], block_size: int, scratch_block: int
) -> NDArray[np.int64]:
    """Return the block tables BN of a forward pass's rows, each padded with `scratch_block` to the longest table."""
    width = -(-max(contexts) // block_size)
    padding = [scratch_block] * width
    tables: list[int] = []
    for chunk in chunks:
        row = chunk.block_table[:width]
        row += padding[len(row) :]
        tables += row * (1 + len(chunk.draft))
    tables += padding * (len(contexts) - len(tables) // width)
    return np.array(tables, dtype=np.int64).reshape(-1, width)


def _logit_rows(chunks: tuple[Chunk, ...]) -> tuple[list[int], list[tuple[Chunk, int]], list[tuple[Chunk, int]]]:
    """Return the indices of the packed tokens that need logits, and `ModelInputs.prompt_rows` and `pooled_rows`."""
    last_rows: list[int] = []
    draft_rows: list[int] = []
    scored: list[tuple[Chunk, int]] = []
    pooled_rows: list[tuple[Chunk, int]] = []
    end_row = 0
    for chunk in chunks:
        start_row, end_row = end_row, end_row + chunk.num_tokens
        if chunk.samples:
            last_rows.append(end_row - len(chunk.draft) - 1)
            draft_rows += range(end_row - len(chunk.draft), end_row)
        if chunk.scored_ids:
            scored.append((chunk, start_row + chunk.scored_start - chunk.start))
        if chunk.num_pooled:
            pooled_rows.append((chunk, end_row - chunk.num_pooled))
    rows = last_rows + draft_rows
    prompt_rows: list[tuple[Chunk, int]] = []
    for chunk, first_row in scored:
        prompt_rows.append((chunk, len(rows)))
        rows += range(first_row, first_row + len(chunk.scored_ids))
    return rows, prompt_rows, pooled_rows


class _Previous:
    """Inputs of the previous decode step, updated in place. Each array is a view of an input tensor without padding."""

    def __init__(self, inputs: ModelInputs, chunks: tuple[Chunk, ...]) -> None:
        metadata, count = inputs.metadata, len(chunks)
        assert metadata.slot_mapping_T is not None
        assert metadata.block_tables_BN is not None
        assert metadata.contexts_B is not None
        self.inputs = inputs
        # A block table belongs to one sequence until the sequence is preempted or ends.
        self.tables = [chunk.block_table for chunk in chunks]
        self.contexts = list(inputs.positions)  # number of tokens of each sequence once the previous step is computed
        self.ids_T: NDArray[np.int64] = inputs.token_ids_T.numpy()[:count]
        self.positions_T: NDArray[np.int64] = metadata.positions_T.numpy()[:count]
        self.slots_T: NDArray[np.int64] = metadata.slot_mapping_T.numpy()[:count]
        self.tables_TN: NDArray[np.int64] = metadata.block_tables_BN.numpy()[:count]
        self.contexts_B: NDArray[np.int64] = metadata.contexts_B.numpy()[:count]


class InputBuilder:
    """Builder of each step's `ModelInputs`, valid until the next `build`: decode steps update the tensors in place."""

    def __init__(self, *, block_size: int, scratch_block: int, min_rows: int) -> None:
        self._block_size, self._scratch_block, self._min_rows = block_size, scratch_block, min_rows
        self._previous: _Previous | None = None

    def build(self, plan: StepPlan, masks: Masks | None = None) -> ModelInputs:
        """Return the inputs of a step plan with at least one chunk. If possible, reuse the previous step's tensors."""
        previous = self._previous
        if previous is not None and plan.is_decode and self._continues(previous, plan.chunks):
            return self._update(previous, plan, masks)
        inputs = self._create(plan, masks)
        self._previous = _Previous(inputs, plan.chunks) if plan.is_decode else None
        return inputs

    def _create(self, plan: StepPlan, masks: Masks | None) -> ModelInputs:
        """Build the inputs of a step with new tensors.

        Rows of padding write to the scratch block, which belongs to no sequence. Each draft token is a row of its own,
        with the block table of its sequence. This is correct because a forward pass writes all keys before it reads
        any, and fast because attention batches all rows of one token.
        """
        chunks, size, min_rows = plan.chunks, self._block_size, self._min_rows
        lengths, contexts, token_ids = _pack_tokens(plan, min_rows)
        tables_BN = _block_tables(chunks, contexts, size, self._scratch_block)
        if len(lengths) == len(token_ids):  # one token per row
            sequence_of_T = np.arange(len(token_ids))
            positions_T = np.array(contexts) - 1
        else:
            sequence_of_T = np.repeat(np.arange(len(lengths)), lengths)
            positions_T = np.concatenate([np.arange(c - n, c) for n, c in zip(lengths, contexts, strict=True)])
        slots_T = tables_BN[sequence_of_T, positions_T // size] * size + positions_T % size
        sampling = [chunk for chunk in chunks if chunk.samples]
        positions = [chunk.num_known_tokens for chunk in sampling]
        for chunk in tuple(sampling):
            sampling += [chunk] * len(chunk.draft)
            positions += range(chunk.num_known_tokens + 1, chunk.num_known_tokens + 1 + len(chunk.draft))
        params = tuple([chunk.params for chunk in sampling])
        forbidden = tuple([chunk.forbidden for chunk in sampling])
        rules = tuple([chunk.rules for chunk in sampling])
        logit_rows, prompt_rows, pooled_rows = ([], [], []) if plan.is_decode else _logit_rows(chunks)
        logit_rows += [0] * max(0, min_rows - len(logit_rows))
        adapters = [(chunk.adapter, chunk.num_tokens) for chunk in chunks]
        return ModelInputs(
            token_ids_T=torch.from_numpy(np.array(token_ids, dtype=np.int64)),
            metadata=AttentionMetadata(
                query_lengths=tuple(lengths),
                context_lengths=tuple(contexts),
                positions_T=torch.from_numpy(positions_T),
                logit_rows_R=None if plan.is_decode else torch.from_numpy(np.array(logit_rows, dtype=np.int64)),
                slot_mapping_T=torch.from_numpy(slots_T),
                block_tables_BN=torch.from_numpy(tables_BN),
                contexts_B=torch.tensor(contexts),
            ),
            params=params,
            all_greedy=all(param.greedy for param in params),
            wants_logprobs=any(param.logprobs is not None for param in params),
            positions=tuple(positions),
            forbidden=forbidden if any(forbidden) else (),
            rules=rules if any(rule is not None for rule in rules) else (),
            prompt_rows=tuple(prompt_rows),
            masks=masks,
            pooled_rows=tuple(pooled_rows),
            previous_rows=plan.previous_rows,
            adapters=tuple(adapters) if any(key for key, _ in adapters) else (),
        )

    def _continues(self, previous: _Previous, chunks: tuple[Chunk, ...]) -> bool:
        """Return True if the chunks decode the previous step's sequences again, and fit into its block tables."""
        return (
            [chunk.start for chunk in chunks] == previous.contexts
            and all(map(is_, [chunk.block_table for chunk in chunks], previous.tables))
            and max(previous.contexts) < previous.tables_TN.shape[1] * self._block_size
        )

    def _update(self, previous: _Previous, plan: StepPlan, masks: Masks | None) -> ModelInputs:
        size, chunks = self._block_size, plan.chunks
        previous.ids_T[:] = 0 if plan.previous_rows else [chunk.token_ids[0] for chunk in chunks]
        previous.positions_T += 1
        previous.slots_T += 1
        previous.contexts_B += 1
        for row, position in enumerate(previous.contexts):
            if position % size == 0:
                block = previous.tables[row][position // size]
                previous.tables_TN[row, position // size], previous.slots_T[row] = block, block * size
        previous.contexts = [context + 1 for context in previous.contexts]
        before, positions = previous.inputs, tuple(previous.contexts)
        num_rows = len(before.metadata.query_lengths)
        forbidden = tuple([chunk.forbidden for chunk in chunks])
        previous.inputs = msgspec.structs.replace(
            before,
            metadata=AttentionMetadata(
                query_lengths=before.metadata.query_lengths,
                context_lengths=positions + (1,) * (num_rows - len(positions)),
                positions_T=before.metadata.positions_T,
                slot_mapping_T=before.metadata.slot_mapping_T,
                block_tables_BN=before.metadata.block_tables_BN,
                contexts_B=before.metadata.contexts_B,
            ),
            positions=positions,
            forbidden=forbidden if any(forbidden) else (),
            masks=masks,
            previous_rows=plan.previous_rows,
        )
        return previous.inputs
