"""What the scheduler decides: a frozen value that says what one step computes."""

from dataclasses import dataclass

from service.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute `num_tokens` of a sequence from position `start` on; draw its next token if `draws`."""

    sequence: Sequence
    start: int
    num_tokens: int
    draws: bool


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
