"""One request inside the engine: its ids, its place in the computation, its blocks and its time stamps.

A plain record. Only the scheduler changes it; everybody else reads.

Who goes first is decided by rank, lowest first, and a rank never changes: a level of priority is worth
`AGEING_SECONDS` of waiting, so that a sequence of priority p ranks as one of priority 0 that came p * AGEING_SECONDS
later. So whoever waits is passed only by what comes within a bounded time, however much comes.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from model.sampling_params import SamplingParams
from model.token_rules import TokenRules
from service.engine.block_pool import root_hash
from service.engine.prompt_lookup import PromptLookup
from service.messages import FinishReason, Pooling, Submit

AGEING_SECONDS = 10.0


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()  # owns no blocks: not yet admitted, or preempted
    RUNNING = auto()  # owns the blocks of its table
    FINISHED = auto()  # owns no blocks, and never will again


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and completion ids, of which the first `num_computed_tokens` have their keys and values in the cache.

    Attributes:
        max_length: tokens at which it ends, prompt included: by `max_tokens` or by the model's context.
        token_ids: prompt, prior tokens (from an earlier attempt), then what this attempt drew.
        block_table: pool blocks in order; block i holds positions i * block_size onward.
        block_hashes: chained hashes of the leading full blocks, as far as they have been needed.
        num_registered_blocks: leading blocks that the prefix cache knows of.
        num_scored_tokens: leading prompt tokens whose successor has been scored, for `prompt_logprobs`.
        rank: what is lower is served first and preempted last; no two are equal.
        rules: what its request says of single tokens, as far as it has come; None for nothing.
        root_hash: what its first block's hash is chained to.
        pooling: its embedding is wanted, and nothing drawn.
        owner: whose it is, see `service.engine.fair_queue`.
        lookup: drafts what may follow; None where nothing is drafted.
        *_seconds: `time.monotonic()`; None for what has not happened.
    """

    uid: str
    attempt: int
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    num_prior_tokens: int
    max_length: int
    rank: tuple[float, int]
    rules: TokenRules | None
    root_hash: bytes
    arrival_seconds: float
    deadline_seconds: float | None
    pooling: Pooling | None = None
    owner: str = ""
    lookup: PromptLookup | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_registered_blocks: int = 0
    num_scored_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    first_scheduled_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None

    @property
    def num_completion_tokens(self) -> int:
        """Tokens after the prompt, prior ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that must be computed before the next one can be drawn."""
        return len(self.token_ids) - self.num_computed_tokens

    @classmethod
    def from_submit(
        cls, submit: Submit, *, arrival_number: int, max_context_length: int, max_draft_tokens: int = 0
    ) -> "Sequence":
        """A new sequence, with the tokens of an earlier attempt where there are any.

        `arrival_number`: the order of submission, for those of one rank. Nothing is drafted where what may be drawn
        depends on what has been: where there are rules, or a grammar.
        """
        rules = TokenRules.of(submit.params, submit.prompt_token_ids, submit.prior_token_ids)
        drafts = max_draft_tokens > 0 and rules is None and submit.grammar is None and submit.pooling is None
        return cls(
            uid=submit.uid,
            attempt=submit.attempt,
            params=submit.params,
            token_ids=[*submit.prompt_token_ids, *submit.prior_token_ids],
            num_prompt_tokens=len(submit.prompt_token_ids),
            num_prior_tokens=len(submit.prior_token_ids),
            max_length=min(len(submit.prompt_token_ids) + submit.params.max_tokens, max_context_length),
            rank=(submit.arrival_seconds + submit.priority * AGEING_SECONDS, arrival_number),
            rules=rules,
            root_hash=root_hash(submit.cache_salt, submit.cache_namespace),
            arrival_seconds=submit.arrival_seconds,
            deadline_seconds=submit.deadline_seconds,
            pooling=submit.pooling,
            owner=submit.owner,
            lookup=PromptLookup(max_draft_tokens) if drafts else None,
        )


def by_rank(sequence: Sequence) -> tuple[float, int]:
    """A key to sort by."""
    return sequence.rank
