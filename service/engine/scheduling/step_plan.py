"""Plan of one engine step, made by the scheduler. A plan holds values, so that execution needs no sequences."""

from collections.abc import Sequence

import msgspec

from model.sampling.params import SamplingParams
from model.sampling.token_constraints import TokenRules

# Matrix products of one to three rows use other CPU kernels, and round differently, than products of four or more rows
# (measured with float32 and bfloat16, oneDNN and MKL). Padding to four rows makes the results batch-invariant.
MIN_ROWS = 4


class Chunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Part of a step plan: compute `num_tokens` tokens of one sequence from position `start` on.

    A msgspec struct, because a step creates one per sequence, and a dataclass takes five times as long to create.

    samples: sample the next token of the sequence.
    token_ids: tokens to compute, without drafts. Empty in a step launched ahead: the previous step samples the tokens.
    block_table: KV blocks of the sequence. The scheduler may append blocks after the plan is made.
    draft: draft tokens, the last of the `num_tokens` tokens. A token is sampled after each draft token too.
    forbidden: token ids that must not be sampled.
    rules: penalties and biases of the request.
    scored_start, scored_ids: for `prompt_logprobs`, the first position whose next token needs a logprob, and the tokens
        that need logprobs.
    num_pooled: number of last tokens whose hidden states are summed for an embedding.
    """

    uid: str
    attempt: int
    start: int
    num_tokens: int
    samples: bool
    token_ids: Sequence[int]
    block_table: list[int]
    params: SamplingParams
    draft: tuple[int, ...] = ()
    forbidden: tuple[int, ...] = ()
    rules: TokenRules | None = None
    scored_start: int = 0
    scored_ids: Sequence[int] = ()
    num_pooled: int = 0

    @property
    def num_known_tokens(self) -> int:
        """Number of tokens of the sequence before this step samples, draft tokens excluded."""
        return self.start + self.num_tokens - len(self.draft)

    @property
    def is_decode(self) -> bool:
        """True if one token and its draft tokens are computed, and a token is sampled."""
        return self.samples and self.num_tokens == 1 + len(self.draft)


class StepPlan(msgspec.Struct, kw_only=True, eq=False):
    """Plan of one step, with statistics of the scheduling.

    previous_rows: for each chunk of a step launched ahead (`Scheduler.schedule_ahead`), the index of its input token
        among the tokens that the previous step samples. Empty in other steps.
    admitted: uid and attempt of the sequences that are computed for the first time.
    num_cached_prompt_tokens: prompt tokens of these sequences that the prefix cache holds.
    num_prefix_queries, num_prefix_hits: tokens looked up and found in the prefix cache, counted as in vLLM.
    is_decode: every chunk computes one token and samples the next token, without drafts. Derived from the chunks.
    """

    chunks: tuple[Chunk, ...]
    previous_rows: tuple[int, ...] = ()
    admitted: list[tuple[str, int]] = []
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_preemptions: int = 0
    is_decode: bool = False

    def __post_init__(self) -> None:
        self.is_decode = all(chunk.num_tokens == 1 and chunk.samples for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes, without padding."""
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def num_rows(self) -> int:
        """Number of tokens that the step computes, with padding."""
        return max(MIN_ROWS, self.num_tokens)
