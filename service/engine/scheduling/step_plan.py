"""Frozen plan of one step: the scheduler's output."""

from collections.abc import Iterable

import msgspec

from service.engine.scheduling.sequence import SequenceState

# Matrix products of one to three rows use other CPU kernels, and round differently, than products of four or more rows
# (measured with float32 and bfloat16, oneDNN and MKL). Padding to four rows makes the results batch-invariant.
MIN_ROWS = 4


class Chunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Part of a step: compute `num_tokens` tokens of a sequence from position `start` on.

    A msgspec struct, because a step creates one per sequence, and a dataclass takes five times as long to create.

    Attributes:
        draws: sample the next token of the sequence.
        draft: draft tokens, the last of the `num_tokens` tokens. A token is sampled after each draft token too.
    """

    sequence: SequenceState
    start: int
    num_tokens: int
    draws: bool
    draft: tuple[int, ...] = ()

    @property
    def num_known_tokens(self) -> int:
        """Number of tokens of the sequence before this step's tokens are sampled, drafts excluded."""
        return self.start + self.num_tokens - len(self.draft)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Plan of one step, with statistics of the scheduling.

    Attributes:
        chunks: the computation of each sequence.
        sampled_rows: indices of each chunk's sampled tokens among all sampled tokens of the step; empty if the chunk
            samples none. Tokens sampled after known tokens come first, in the order of the chunks. Tokens sampled after
            draft tokens follow.
        is_decode: every chunk computes one token and samples the next token, without drafts.
        ended: sequences that end without computation: an expired deadline, or nothing left to compute.
        previous_rows: for each chunk of a step launched ahead (`service.engine.scheduling.lookahead`), the index of
            its input token among the tokens that the previous step samples. Empty in other steps.
        num_cached_prompt_tokens: prompt tokens found in the prefix cache by sequences admitted for the first time.
        num_prefix_queries: tokens looked up in the prefix cache, counted as in vLLM.
        num_prefix_hits: tokens found in the prefix cache.
        num_preemptions: sequences preempted while the step was planned.
    """

    chunks: tuple[Chunk, ...]
    sampled_rows: list[tuple[int, ...]]
    is_decode: bool
    ended: tuple[SequenceState, ...]
    num_cached_prompt_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_preemptions: int
    previous_rows: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Number of computed tokens."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        """Number of rows of the forward pass: tokens and padding."""
        return max(MIN_ROWS, self.num_tokens)


def step_plan(
    chunks: Iterable[Chunk],
    *,
    ended: tuple[SequenceState, ...] = (),
    num_cached_prompt_tokens: int = 0,
    num_prefix_queries: int = 0,
    num_prefix_hits: int = 0,
    num_preemptions: int = 0,
    previous_rows: tuple[int, ...] = (),
) -> StepPlan:
    """Create a plan, with `sampled_rows` and `is_decode` derived from its chunks."""
    chunks = tuple(chunks)
    return StepPlan(
        chunks=chunks,
        sampled_rows=sampled_rows(chunks),
        is_decode=all(chunk.num_tokens == 1 and chunk.draws for chunk in chunks),
        ended=ended,
        num_cached_prompt_tokens=num_cached_prompt_tokens,
        num_prefix_queries=num_prefix_queries,
        num_prefix_hits=num_prefix_hits,
        num_preemptions=num_preemptions,
        previous_rows=previous_rows,
    )


def sampled_rows(chunks: Iterable[Chunk]) -> list[tuple[int, ...]]:
    """Return the indices of each chunk's sampled tokens, see `StepPlan.sampled_rows`."""
    after = sum([chunk.draws for chunk in chunks])
    row = 0
    found: list[tuple[int, ...]] = []
    for chunk in chunks:
        if not chunk.draws:
            found.append(())
            continue
        found.append((row, *range(after, after + len(chunk.draft))) if chunk.draft else (row,))
        row, after = row + 1, after + len(chunk.draft)
    return found
