"""What the scheduler decides: a frozen value that says what one step computes."""

from collections.abc import Iterable

import msgspec

from service.engine.sequence import Sequence

# A matrix product of one to three rows runs another kernel on the CPU, and rounds differently, than one of four and
# more (measured with float32 and bfloat16, oneDNN and MKL): with rows that nobody reads as padding, a sequence's
# numbers do not change when others join it or leave.
MIN_ROWS = 4


class Chunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Compute `num_tokens` of a sequence from position `start` on; draw its next token if `draws`.

    `draft` are the last of these tokens: what may follow the sequence. After each of them a token is drawn, too.
    A struct, since every sequence has one in every step: a dataclass takes five times as long to make.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    draws: bool
    draft: tuple[int, ...] = ()

    @property
    def num_known_tokens(self) -> int:
        """Tokens of the sequence once this is computed, before any is drawn."""
        return self.start + self.num_tokens - len(self.draft)


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one step computes, and what happened while it was decided.

    Attributes:
        drawn_rows: which of the step's draws are each chunk's own; none where it does not draw. First come the draws
            after the sequences' own tokens, in the order of the chunks, then those after drafts.
        is_decode: every sequence computes one token, and draws the one after it: nothing is drafted, no prompt read.
        ended: finished without computing: a deadline passed, or nothing was left to do.
        after_rows: of a step ahead (`service.engine.lookahead`): which draw of the step before is each chunk's token,
            and not known yet. Empty in any other.
        num_cached_prompt_tokens: of sequences that begin.
        num_prefix_queries: in tokens, as vLLM counts them.
    """

    chunks: tuple[Chunk, ...]
    drawn_rows: list[tuple[int, ...]]
    is_decode: bool
    ended: tuple[Sequence, ...]
    num_cached_prompt_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_preemptions: int
    after_rows: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        """Rows that the model is given: tokens, and padding."""
        return max(MIN_ROWS, self.num_tokens)


def step_plan(
    chunks: Iterable[Chunk],
    *,
    ended: tuple[Sequence, ...] = (),
    num_cached_prompt_tokens: int = 0,
    num_prefix_queries: int = 0,
    num_prefix_hits: int = 0,
    num_preemptions: int = 0,
    after_rows: tuple[int, ...] = (),
) -> StepPlan:
    """A plan, with what follows from its chunks."""
    chunks = tuple(chunks)
    return StepPlan(
        chunks=chunks,
        drawn_rows=drawn_rows(chunks),
        is_decode=all(chunk.num_tokens == 1 and chunk.draws for chunk in chunks),
        ended=ended,
        num_cached_prompt_tokens=num_cached_prompt_tokens,
        num_prefix_queries=num_prefix_queries,
        num_prefix_hits=num_prefix_hits,
        num_preemptions=num_preemptions,
        after_rows=after_rows,
    )


def drawn_rows(chunks: Iterable[Chunk]) -> list[tuple[int, ...]]:
    """See `StepPlan`."""
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
