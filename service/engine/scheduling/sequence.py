"""State of one sequence inside the engine, changed only by the scheduler: tokens, progress, KV blocks and timestamps.

Sequences are served by rank, lowest first. A rank never changes. One priority level equals `AGEING_SECONDS` of waiting:
a sequence of priority p ranks like a sequence of priority 0 that arrived p * AGEING_SECONDS later. So only requests
that arrive within a bounded time can get a lower rank than a waiting sequence.
"""

from collections.abc import Sequence
from enum import Enum, auto
from operator import attrgetter

from model.sampling.token_constraints import TokenRules
from service.engine.scheduling.block_pool import block_hash, root_hash
from service.engine.scheduling.speculation import PromptLookup
from service.ipc.messages import FinishReason, Submit

AGEING_SECONDS = 10.0


class SequenceStatus(Enum):
    """Life-cycle state of a sequence."""

    WAITING = auto()  # owns no blocks: not yet admitted, or preempted
    RUNNING = auto()  # owns the blocks of its table
    FINISHED = auto()  # owns no blocks, and never will again


class SequenceState:
    """State of one sequence. The KV-cache holds the keys and values of its first `num_computed_tokens` tokens."""

    def __init__(
        self,
        submit: Submit,
        *,
        arrival_number: int,
        max_context_length: int,
        max_draft_tokens: int = 0,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        params, prompt_ids, prior_ids = submit.params, submit.prompt_token_ids, submit.prior_token_ids
        self.uid, self.attempt, self.tenant = submit.uid, submit.attempt, submit.tenant
        self.params, self.pooling, self.adapter = params, submit.pooling, submit.adapter
        self.token_ids = [*prompt_ids, *prior_ids]  # then the tokens sampled by this attempt
        self.num_prompt_tokens, self.num_prior_tokens = len(prompt_ids), len(prior_ids)
        self.max_length = min(len(prompt_ids) + params.max_tokens, max_context_length)  # prompt included
        self.eos_token_ids = () if params.ignore_eos else eos_token_ids
        # Lowest rank is served first and preempted last. Arrival numbers make ranks unique.
        self.rank = (submit.arrival_seconds + submit.priority * AGEING_SECONDS, arrival_number)
        # No drafts with rules or a grammar: allowed tokens depend on the tokens before.
        self.rules = TokenRules(params, prompt_ids, prior_ids) if params.has_token_rules else None
        has_drafts = max_draft_tokens and self.rules is None and submit.grammar is None and submit.pooling is None
        self.lookup = PromptLookup(max_draft_tokens) if has_drafts else None
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = self.num_cached_tokens = self.num_preemptions = 0
        self.block_table: list[int] = []  # block i holds the positions from i * block_size on
        self.num_registered_blocks = 0  # first blocks that were added to the prefix cache
        self.num_scored_tokens = 0  # first prompt tokens whose next token has its logprob, for `prompt_logprobs`
        self._root_hash = root_hash(submit.cache_salt, submit.cache_namespace, submit.adapter)
        # True if neither a salt nor an adapter limits which requests find these blocks. Only such blocks are published.
        self.has_public_prefix = not submit.cache_salt and not submit.adapter
        self._block_hashes: list[bytes] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        # Timestamps of `time.monotonic()`.
        self.arrival_seconds, self.deadline_seconds = submit.arrival_seconds, submit.deadline_seconds
        self.first_scheduled_seconds: float | None = None
        self.first_token_seconds: float | None = None
        self.last_token_seconds: float | None = None

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens of the sequence after the prompt, tokens of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def full_block_hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Return the chained hashes of the sequence's first `num_blocks` KV blocks, which must be full."""
        for index in range(len(self._block_hashes), num_blocks):
            parent = self._block_hashes[-1] if self._block_hashes else self._root_hash
            ids = self.token_ids[index * block_size : (index + 1) * block_size]
            self._block_hashes.append(block_hash(parent, ids))
        return self._block_hashes[:num_blocks]

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """Token ids that must not be sampled next: ends of bad words; before `min_tokens`, EOS and stop tokens too."""
        words = () if self.rules is None else self.rules.forbidden
        if self.num_completion_tokens >= self.params.min_tokens:
            return words
        return (*self.params.stop_token_ids, *self.eos_token_ids, *words)

    def append(self, token_id: int | None, now: float) -> bool:
        """Append a sampled token. Set the finish reason and return True if the sequence ends.

        A `token_id` of None means that the request allows no next token, so the sequence ends.
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
        """Append the tokens sampled after accepted draft tokens. Return True if the sequence ends.

        token_ids: the token sampled after the known tokens, already appended, then the token after each draft token.
            A draft token is accepted, and counts as computed, if it and all drafts before it equal the sampled tokens.
        """
        for guessed, previous, following in zip(draft, token_ids, token_ids[1:], strict=False):
            if guessed != previous:
                break
            self.num_computed_tokens += 1
            if self.append(following, now):
                return True
        return False

    def check_end(self) -> bool:
        """Set the finish reason and return True if the last token ends the sequence, by its id or by the length."""
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


by_rank = attrgetter("rank")
