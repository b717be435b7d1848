"""What the scheduler decides: a frozen value that says what one step computes."""

from collections.abc import Iterator
from dataclasses import dataclass

from service.engine.sequence import Sequence

# A matrix product of one to three rows runs another kernel on the CPU, and rounds differently, than one of four and
# more (measured with float32 and bfloat16, oneDNN and MKL): with rows that nobody reads as padding, a sequence's
# numbers do not change when others join it or leave.
MIN_ROWS = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `num_tokens` of a sequence from position `start` on; draw its next token if `draws`.

    `draft` are the last of these tokens: what may follow the sequence. After each of them a token is drawn, too.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes, and what happened while it was decided."""

    chunks: tuple[Chunk, ...]
    ended: tuple[Sequence, ...]  # finished without computing: a deadline passed, or nothing was left to do
    num_cached_prompt_tokens: int  # of sequences that begin
    num_prefix_queries: int  # in tokens, as vLLM counts them
    num_prefix_hits: int
    num_preemptions: int

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_rows(self) -> int:
        """Rows that the model is given: tokens, and padding."""
        return max(MIN_ROWS, self.num_tokens)

    def drawn_rows(self) -> Iterator[tuple[Chunk, tuple[int, ...]]]:
        """Each chunk that draws, and which of the step's draws are its own.

        First come the draws after the sequences' own tokens, in the order of the chunks, then those after drafts.
        """
        draws = [chunk for chunk in self.chunks if chunk.draws]
        after = len(draws)
        for row, chunk in enumerate(draws):
            yield chunk, (row, *range(after, after + len(chunk.draft)))
            after += len(chunk.draft)
