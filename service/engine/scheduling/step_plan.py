"""Plan of one engine step, made by the scheduler. A plan holds all values that the execution of the step needs."""

from collections.abc import Sequence

import msgspec

from model.sampling.params import SamplingParams
from model.sampling.token_constraints import TokenRules

# Matrix products of one to three rows use other CPU kernels, and round differently, than products of four or more rows
# (measured with float32 and bfloat16, oneDNN and MKL). With padding to four rows, results differ less between batches.
MIN_ROWS = 4


# A msgspec struct: a step creates a chunk per sequence, and creating a dataclass takes five times as long.
class Chunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Part of a step plan: compute `num_tokens` tokens of one sequence, drafts included, from position `start` on."""

    uid: str
    attempt: int
    start: int
    num_tokens: int
    samples: bool  # the next token of the sequence
    token_ids: Sequence[int]  # without drafts; empty in a step launched ahead: the previous step samples the inputs
    block_table: list[int]  # the scheduler may append blocks after the plan is made
    params: SamplingParams
    draft: tuple[int, ...] = ()  # the last of the `num_tokens` tokens; a token is sampled after each draft token too
    forbidden: tuple[int, ...] = ()  # token ids that must not be sampled
    rules: TokenRules | None = None
    scored_start: int = 0  # position of the first token whose next token needs a logprob, for `prompt_logprobs`
    scored_ids: Sequence[int] = ()  # prompt tokens that need logprobs, from position `scored_start` + 1 on
    num_pooled: int = 0  # last tokens whose hidden states are summed for an embedding
    adapter: str = ""  # key of the sequence's LoRA adapter; empty: the base model

    @property
    def num_known_tokens(self) -> int:
        """Position after the chunk's last token, without draft tokens: the position of the next sampled token."""
        return self.start + self.num_tokens - len(self.draft)

    @property
    def is_decode(self) -> bool:
        """True if the step computes one token of the sequence, and its draft tokens, and samples the next token."""
        return self.samples and self.num_tokens == 1 + len(self.draft)


class StepPlan(msgspec.Struct, kw_only=True, eq=False):
    """Plan of one step: a chunk for each sequence that the step computes, and scheduling statistics for the metrics."""

    chunks: tuple[Chunk, ...]
    # For each chunk of a step launched ahead: the index of its input token among the tokens of the previous step.
    previous_rows: tuple[int, ...] = ()
    admitted: list[tuple[str, int]] = []  # uid and attempt of the sequences that are computed for the first time
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0  # of the admitted sequences
    num_prefix_queries: int = 0  # tokens looked up in the prefix cache, counted as in vLLM
    num_prefix_hits: int = 0
    num_preemptions: int = 0
    is_decode: bool = False  # every chunk computes one token and samples the next token, without drafts

    def __post_init__(self) -> None:
        self.is_decode = all(chunk.num_tokens == 1 and chunk.samples for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def num_rows(self) -> int:
        """Number of tokens that the step computes, padding to at least `MIN_ROWS` included."""
        return max(MIN_ROWS, self.num_tokens)
