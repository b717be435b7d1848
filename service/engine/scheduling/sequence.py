"""State of one sequence inside the engine: token ids, progress, KV blocks, stop conditions and timestamps.

Only the scheduler changes a sequence.

Sequences are served by rank, lowest first. A rank never changes. One priority level equals `AGEING_SECONDS` of waiting:
a sequence of priority p ranks like a sequence of priority 0 that arrived p * AGEING_SECONDS later. So only requests
that arrive within a bounded time can overtake a waiting sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter

from model.sampling.params import SamplingParams
from model.sampling.token_constraints import TokenRules
from service.engine.scheduling.block_pool import block_hash, root_hash
from service.engine.scheduling.speculation import PromptLookup
from service.ipc.messages import FinishReason, Pooling, Submit

AGEING_SECONDS = 10.0


class SequenceStatus(Enum):
    """Life-cycle state of a sequence."""

    WAITING = auto()  # owns no blocks: not yet admitted, or preempted
    RUNNING = auto()  # owns the blocks of its table
    FINISHED = auto()  # owns no blocks, and never will again


@dataclass(slots=True, eq=False)
class SequenceState:
    """Prompt and completion ids, of which the first `num_computed_tokens` have their keys and values in the cache.

    Attributes:
        max_length: number of tokens at which the sequence ends, prompt included: by `max_tokens` or the context length.
        eos_token_ids: end-of-sequence tokens that end the sequence; empty with `ignore_eos`.
        token_ids: prompt, prior tokens (sampled by an earlier attempt), then tokens sampled by this attempt.
        block_table: ids of KV blocks in order. Block i holds the positions from i * block_size on.
        block_hashes: chained hashes of the leading full blocks, see `full_block_hashes`.
        num_registered_blocks: number of leading blocks registered in the prefix cache.
        num_scored_tokens: number of leading prompt tokens whose successor has its logprob, for `prompt_logprobs`.
        rank: the lowest rank is served first and preempted last. Ranks are unique.
        rules: logit bias, penalties, allowed tokens and bad words of the request, with their state; None without rules.
        root_hash: parent hash of the first block.
        pooling: pooling of the requested embedding, for which no token is sampled; None for a completion.
        tenant: API key or address of the client, see `service.engine.scheduling.fair_queue`.
        lookup: source of draft tokens; None without speculative decoding.
        *_seconds: timestamps of `time.monotonic()`; None for events that have not happened.
    """

    uid: str
    attempt: int
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    num_prior_tokens: int
    max_length: int
    eos_token_ids: tuple[int, ...]
    rank: tuple[float, int]
    rules: TokenRules | None
    root_hash: bytes
    arrival_seconds: float
    deadline_seconds: float | None
    pooling: Pooling | None = None
    tenant: str = ""
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
        """Number of tokens after the prompt, prior tokens included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Number of tokens to compute before the next token can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    def full_block_hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Return the chained hashes of the first `num_blocks` full blocks. Hashes stay valid: tokens are only added."""
        for index in range(len(self.block_hashes), num_blocks):
            parent = self.block_hashes[-1] if self.block_hashes else self.root_hash
            ids = self.token_ids[index * block_size : (index + 1) * block_size]
            self.block_hashes.append(block_hash(parent, ids))
        return self.block_hashes[:num_blocks]

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """Tokens that must not be sampled next: stop tokens before `min_tokens`, and the ends of bad words."""
        words = () if self.rules is None else self.rules.forbidden
        if self.num_completion_tokens >= self.params.min_tokens:
            return words
        return (*self.params.stop_token_ids, *self.eos_token_ids, *words)

    def append(self, token_id: int | None, now: float) -> bool:
        """Append a token sampled at time `now`. Return True, with the finish reason set, if the sequence ends.

        A token of None ends the sequence because its request forbids every token.
        """
        if token_id is None:
            self.finish_reason = FinishReason.REFUSED
            return True
        self.token_ids.append(token_id)
        if self.rules is not None:
            self.rules.append(token_id)
        self.last_token_seconds = now
        if self.first_token_seconds is None:
            self.first_token_seconds = now
        return self.check_end()

    def append_drafted(self, token_ids: Sequence[int | None], draft: Sequence[int], now: float) -> bool:
        """Append the tokens sampled after draft tokens, up to the first wrong draft token. Return True at an end.

        The keys and values of right draft tokens count as computed.

        Args:
            token_ids: the sampled tokens. The first token follows the known tokens and has been appended.
            draft: guesses of the tokens in `token_ids`, in order.
            now: time of sampling.
        """
        for guessed, previous, following in zip(draft, token_ids, token_ids[1:], strict=False):
            if guessed != previous:
                break
            self.num_computed_tokens += 1
            if self.append(following, now):
                return True
        return False

    def check_end(self) -> bool:
        """Return True, with the finish reason set, if the last token ends the sequence."""
        token_id, length = self.token_ids[-1], len(self.token_ids)
        if length - self.num_prompt_tokens > self.params.min_tokens:
            if token_id in self.eos_token_ids:
                self.finish_reason = FinishReason.STOP
                return True
            if token_id in self.params.stop_token_ids:
                self.finish_reason, self.stop_reason = FinishReason.STOP, token_id
                return True
        if length >= self.max_length:
            self.finish_reason = FinishReason.LENGTH
            return True
        return False

    @classmethod
    def from_submit(
        cls,
        submit: Submit,
        *,
        arrival_number: int,
        max_context_length: int,
        max_draft_tokens: int = 0,
        eos_token_ids: tuple[int, ...] = (),
    ) -> "SequenceState":
        """Create a sequence from a submission, with the prior tokens of an earlier attempt.

        Sequences with rules or a grammar get no drafts, because their allowed tokens depend on the tokens before.

        Args:
            submit: the submission.
            arrival_number: order of submission, which makes ranks unique.
            max_context_length: maximum number of tokens of the sequence, prompt included.
            max_draft_tokens: maximum length of a draft; 0 for no speculative decoding.
            eos_token_ids: end-of-sequence tokens of the model.
        """
        rules = None
        if submit.params.has_token_rules:
            rules = TokenRules(submit.params, submit.prompt_token_ids, submit.prior_token_ids)
        drafts = max_draft_tokens > 0 and rules is None and submit.grammar is None and submit.pooling is None
        return cls(
            uid=submit.uid,
            attempt=submit.attempt,
            params=submit.params,
            token_ids=[*submit.prompt_token_ids, *submit.prior_token_ids],
            num_prompt_tokens=len(submit.prompt_token_ids),
            num_prior_tokens=len(submit.prior_token_ids),
            max_length=min(len(submit.prompt_token_ids) + submit.params.max_tokens, max_context_length),
            eos_token_ids=() if submit.params.ignore_eos else eos_token_ids,
            rank=(submit.arrival_seconds + submit.priority * AGEING_SECONDS, arrival_number),
            rules=rules,
            root_hash=root_hash(submit.cache_salt, submit.cache_namespace),
            arrival_seconds=submit.arrival_seconds,
            deadline_seconds=submit.deadline_seconds,
            pooling=submit.pooling,
            tenant=submit.tenant,
            lookup=PromptLookup(max_draft_tokens) if drafts else None,
        )


# Sort key of sequences.
by_rank = attrgetter("rank")
