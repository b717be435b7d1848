"""Plan of one step: the scheduler's output. It holds values only, so that execution needs no other engine state."""

from collections.abc import Sequence

import msgspec

from model.sampling.params import SamplingParams
from model.sampling.token_constraints import TokenRules

# Matrix products of one to three rows use other CPU kernels, and round differently, than products of four or more rows
# (measured with float32 and bfloat16, oneDNN and MKL). Padding to four rows makes the results batch-invariant.
MIN_ROWS = 4


class Chunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Part of a step: compute `num_tokens` tokens of a sequence from position `start` on.

    A msgspec struct, because a step creates one per sequence, and a dataclass takes five times as long to create.

    Attributes:
        uid, attempt: identity of the sequence.
        samples: sample the next token of the sequence.
        token_ids: tokens to compute, without drafts. Empty in a step launched ahead: the previous step samples them.
        block_table: KV blocks of the sequence. The scheduler may append blocks after this step has been planned.
        draft: draft tokens, the last of the `num_tokens` tokens. A token is sampled after each draft token too.
        forbidden: token ids that must not be sampled.
        rules: penalties and biases of the request; None without rules.
        scored_start: position of the first token whose successor needs a logprob, for `prompt_logprobs`.
        scored_ids: prompt tokens after the scored positions, which need logprobs.
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
        """Number of tokens of the sequence before this step's tokens are sampled, drafts excluded."""
        return self.start + self.num_tokens - len(self.draft)

    @property
    def is_decode(self) -> bool:
        """True if only one token, and its drafts, are computed, and a token is sampled."""
        return self.samples and self.num_tokens == 1 + len(self.draft)


class StepPlan(msgspec.Struct, kw_only=True, eq=False):
    """Plan of one step, with statistics of the scheduling.

    Attributes:
        chunks: the computation of each sequence.
        previous_rows: for each chunk of a step launched ahead (`Scheduler.schedule_ahead`), the index of its input
            token among the tokens that the previous step samples. Empty in other steps.
        admitted: uid and attempt of the sequences that are computed for the first time.
        num_prompt_tokens: computed tokens of prompts.
        num_cached_prompt_tokens: prompt tokens found in the prefix cache by sequences admitted for the first time.
        num_prefix_queries: tokens looked up in the prefix cache, counted as in vLLM.
        num_prefix_hits: tokens found in the prefix cache.
        num_preemptions: sequences preempted while the step was planned.
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
        """Number of computed tokens."""
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def num_rows(self) -> int:
        """Number of rows of the forward pass: tokens and padding."""
        return max(MIN_ROWS, self.num_tokens)
