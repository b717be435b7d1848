"""Conversion of a `StepPlan` to the tensors of one forward pass. Pure functions.

`service.engine.execution.decode_inputs` reuses the tensors of consecutive decode steps instead.

Legend: T packed tokens, B sequences, N blocks of the longest table, R rows whose logits are wanted.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.attention.metadata import AttentionMetadata
from model.sampling.params import SamplingParams
from model.sampling.token_constraints import TokenRules
from service.engine.execution.embedding_pooling import PooledRows, pooled_rows
from service.engine.execution.grammar_masks import Masks
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.sequence import SequenceState
from service.engine.scheduling.step_plan import MIN_ROWS, Chunk, StepPlan


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logit rows for the prompt logprobs of a chunk, from `first_row` on, with one target token for each row."""

    uid: str
    first_row: int
    targets: tuple[int, ...]
    num_top: int


class ModelInputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Inputs of one forward pass. A token is sampled from each of the first `len(params)` logit rows.

    Attributes:
        token_ids_T: packed token ids; 0 for the tokens of `previous_rows`.
        params: sampling parameters of the sampled rows, in the order of `StepPlan.sampled_rows`.
        all_greedy: all `params` are greedy.
        wants_logprobs: some of `params` request logprobs.
        forbidden: forbidden token ids of each sampled row; empty if no row has any.
        rules: token rules of each sampled row, which the commit of the step will change; empty if no row has any.
        masks: grammar masks, possibly still being computed.
        previous_rows: rows of the previous step whose sampled tokens are the first token ids. The device knows these
            tokens before the host. Empty if the host knows all token ids.
    """

    token_ids_T: Tensor
    metadata: AttentionMetadata
    params: tuple[SamplingParams, ...]
    all_greedy: bool
    wants_logprobs: bool
    positions: tuple[int, ...]
    forbidden: tuple[tuple[int, ...], ...]
    rules: tuple[TokenRules | None, ...]
    prompt_rows: tuple[PromptRows, ...]
    masks: Masks | None = None
    pooled_rows: tuple[PooledRows, ...] = ()
    previous_rows: tuple[int, ...] = ()


def build_inputs(
    plan: StepPlan,
    scheduler: Scheduler,
    *,
    block_size: int,
    scratch_block: int,
    min_rows: int = MIN_ROWS,
    masks: Masks | None = None,
) -> ModelInputs:
    """Build the tensors of a plan with at least one chunk.

    Rows of padding, up to `min_rows`, write to `scratch_block`, which belongs to no sequence. Each draft token is a
    separate sequence of one token with the same block table. This is correct because a forward pass writes all keys
    before it reads any, and fast because attention batches all sequences of one token.
    """
    chunks = plan.chunks
    num_padding = max(0, min_rows - plan.num_tokens)
    lengths, contexts = _lengths(chunks)
    lengths += [1] * num_padding
    contexts += [1] * num_padding
    token_ids = [0] * len(plan.previous_rows)
    for chunk in () if plan.previous_rows else chunks:
        token_ids += chunk.sequence.token_ids[chunk.start : chunk.num_known_tokens]
        token_ids += chunk.draft
    token_ids += [0] * num_padding
    tables_BN = _block_tables(chunks, contexts, block_size, scratch_block)
    if len(lengths) == len(token_ids):
        sequence_of_T = np.arange(len(token_ids))
        positions_T = np.array(contexts) - 1
    else:
        sequence_of_T = np.repeat(np.arange(len(lengths)), lengths)
        positions_T = np.concatenate([np.arange(c - n, c) for n, c in zip(lengths, contexts, strict=True)])
    slots_T = tables_BN[sequence_of_T, positions_T // block_size] * block_size + positions_T % block_size
    draws = _sampled_rows(plan)
    params = tuple([chunk.sequence.params for chunk, _ in draws])
    logit_rows, prompt_rows = _logit_rows(chunks)
    logit_rows += [0] * max(0, min_rows - len(logit_rows))
    rules = tuple(chunk.sequence.rules for chunk, _ in draws)
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
        positions=tuple(chunk.num_known_tokens + number for chunk, number in draws),
        forbidden=forbidden_ids(scheduler, [chunk.sequence for chunk, _ in draws]),
        rules=rules if any(rule is not None for rule in rules) else (),
        prompt_rows=prompt_rows,
        masks=masks,
        pooled_rows=pooled_rows(chunks),
        previous_rows=plan.previous_rows,
    )


def forbidden_ids(scheduler: Scheduler, sequences: list[SequenceState]) -> tuple[tuple[int, ...], ...]:
    """Return the forbidden token ids of each sequence; empty if no sequence has any."""
    forbidden = tuple([scheduler.forbidden_token_ids(sequence) for sequence in sequences])
    return forbidden if any(forbidden) else ()


def _lengths(chunks: tuple[Chunk, ...]) -> tuple[list[int], list[int]]:
    """Return the query lengths and context lengths of all chunks. Each draft token counts as a separate sequence."""
    lengths: list[int] = []
    contexts: list[int] = []
    for chunk in chunks:
        known = chunk.num_known_tokens
        lengths.append(known - chunk.start)
        contexts.append(known)
        if chunk.draft:
            lengths += [1] * len(chunk.draft)
            contexts += range(known + 1, known + 1 + len(chunk.draft))
    return lengths, contexts


def _block_tables(chunks: tuple[Chunk, ...], contexts: list[int], size: int, scratch_block: int) -> NDArray[np.int64]:
    """Return the block tables, BN int64, with one more row for each draft token, padded with the scratch block."""
    width = -(-max(contexts) // size)
    padding = [scratch_block] * width
    flat: list[int] = []
    for chunk in chunks:
        row = chunk.sequence.block_table[:width]
        row += padding[len(row) :]
        flat += row * (1 + len(chunk.draft))
    flat += padding * (len(contexts) - len(flat) // width)
    return np.array(flat, dtype=np.int64).reshape(-1, width)


def _sampled_rows(plan: StepPlan) -> list[tuple[Chunk, int]]:
    """Return the chunk of each sampled row, and the number of draft tokens before the sampled token."""
    draws = [chunk for chunk in plan.chunks if chunk.draws]
    of_drafts = [(chunk, number) for chunk in draws for number in range(1, 1 + len(chunk.draft))]
    return [(chunk, 0) for chunk in draws] + of_drafts


def _logit_rows(chunks: tuple[Chunk, ...]) -> tuple[list[int], tuple[PromptRows, ...]]:
    """Return the packed tokens that need logits: last tokens, then draft tokens, then tokens of scored prompts."""
    last_rows: list[int] = []
    draft_rows: list[int] = []
    scored: list[tuple[Chunk, int]] = []
    start_row = 0
    for chunk in chunks:
        if chunk.draws:
            end_row = start_row + chunk.num_tokens
            last_rows.append(end_row - len(chunk.draft) - 1)
            draft_rows += range(end_row - len(chunk.draft), end_row)
        if chunk.sequence.params.prompt_logprobs is not None:
            scored.append((chunk, start_row))
        start_row += chunk.num_tokens
    rows = last_rows + draft_rows
    prompt_rows: list[PromptRows] = []
    for chunk, start_row in scored:
        sequence = chunk.sequence
        # After a preemption, recomputed positions already have their logprobs.
        begin = max(chunk.start, sequence.num_scored_tokens)
        end = min(chunk.start + chunk.num_tokens, sequence.num_prompt_tokens - 1)
        if begin < end:
            targets = tuple(sequence.token_ids[begin + 1 : end + 1])
            num_top = sequence.params.prompt_logprobs or 0
            prompt_rows.append(PromptRows(sequence.uid, len(rows), targets, num_top))
            first_row = start_row + begin - chunk.start
            rows += range(first_row, first_row + len(targets))
    return rows, tuple(prompt_rows)
