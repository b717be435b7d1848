"""Scheduler of the engine: chooses the sequences and tokens that the next step computes. Pure Python on integers.

There are no separate prefill and decode phases. Each sequence has `num_computed_tokens`, which must catch up with its
number of tokens. Sequences with one token left to compute (decodes) are served first. The rest of the step's
`max_batched_tokens` goes to prefills in rank order, limited per sequence by `PrefillBudget`. This rule covers
continuous batching, chunked prefill, prefix-cache hits, and resumption after a preemption or a crash. (vLLM: Kwon et
al. 2023, arXiv 2309.06180. Sarathi: Agrawal et al. 2023, arXiv 2308.16369.)

Running sequences do not starve. The sequence of lowest rank is served first and may preempt sequences of higher rank,
and every admitted sequence fits in the block pool by itself. So the sequence of lowest rank always makes progress and
ends, and later arrivals get higher ranks. A waiting sequence never preempts a running sequence.
"""

import math
import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import msgspec

from service.engine.scheduling.block_pool import BlockPool
from service.engine.scheduling.cache_events import CacheLog
from service.engine.scheduling.fair_queue import FairQueue
from service.engine.scheduling.latency_limits import PrefillBudget, RunningLimit
from service.engine.scheduling.sequence import SequenceState, SequenceStatus, by_rank
from service.engine.scheduling.speculation import DraftPolicy
from service.engine.scheduling.step_plan import Chunk, StepPlan
from service.ipc.messages import FinishReason, Pooling


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes and budgets of an engine: KV blocks, running sequences, tokens per step and latency targets."""

    block_size: int = 16  # tokens per KV block
    num_blocks: int  # KV blocks of all running sequences together
    max_num_running: int = 64
    max_batched_tokens: int = 512  # tokens computed in one step
    enable_prefix_cache: bool = True  # share the KV blocks of equal prefixes
    kv_cache_dtype: Literal["auto", "float16", "int8"] = "auto"  # auto: the dtype of the model
    max_context_length: int | None = None  # tokens of a sequence, prompt included; None: the model's maximum
    max_draft_tokens: int = 0  # of a sequence in one step; 0: no speculative decoding
    prompt_slowdown: float = math.inf  # maximum slowdown of a decode step by one prompt, as a factor
    target_itl_seconds: float = math.inf  # target of the mean inter-token latency

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_running", "max_batched_tokens", "max_context_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, not {value}")
        if self.max_batched_tokens < self.max_num_running:
            raise ValueError(
                f"max_batched_tokens={self.max_batched_tokens} must be at least "
                f"max_num_running={self.max_num_running}: a running sequence needs one token a step"
            )


class SequenceUpdate(msgspec.Struct, frozen=True, eq=False):
    """One sequence of a committed step: its computed chunk, and its accepted tokens' rows in the step's outputs."""

    sequence: SequenceState
    chunk: Chunk
    rows: tuple[int, ...]


class Scheduler:
    """Scheduler of an engine: owns the waiting and the running sequences, and the pool of KV blocks."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_context_length: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._max_context_length = max_context_length
        self._clock = clock
        self._pool = BlockPool(config.num_blocks)
        self._draft_policy = DraftPolicy(config.max_batched_tokens)
        self._prefill_budget = PrefillBudget(config.prompt_slowdown)
        self._limit = RunningLimit(config.target_itl_seconds, config.max_num_running)
        self._max_step_tokens = config.max_batched_tokens  # fewer after a step that lacked memory, until idle
        self._scheduled_seconds = self._committed_seconds = 0.0
        self._sequences: dict[str, SequenceState] = {}
        self._waiting = FairQueue()
        self._running: list[SequenceState] = []  # by rank
        self._ended: list[SequenceState] = []
        self._num_preemptions = self._num_prompt_tokens = 0  # of the step that is being planned

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def max_num_running(self) -> int:
        return self._limit.num_sequences

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def has_work(self) -> bool:
        """True if the next step has a sequence to compute or to end."""
        return bool(self._waiting or self._running or self._ended)

    def sequences(self) -> list[SequenceState]:
        return list(self._sequences.values())

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence. Raise ValueError for an empty prompt, and if context or KV-cache is too small."""
        length, limit = len(sequence.token_ids), self._max_context_length
        assert sequence.uid not in self._sequences
        if not 1 <= sequence.num_prompt_tokens <= limit or length > limit:
            raise ValueError(f"the prompt has {length} tokens; send a prompt of 1 to {limit} tokens")
        capacity = self._config.num_blocks * self._config.block_size
        if sequence.max_length > capacity:
            raise ValueError(
                f"prompt and max_tokens together may reach {sequence.max_length} tokens, but the KV-cache holds "
                f"{capacity}; send a shorter prompt, or lower max_tokens"
            )
        if not self._sequences:
            self._max_step_tokens = self._config.max_batched_tokens
        self._sequences[sequence.uid] = sequence
        self._waiting.add(sequence)
        if sequence.num_prior_tokens and sequence.check_end():
            self._ended.append(sequence)  # the previous attempt had sampled all tokens, and only its ending was lost

    def take_ended(self) -> list[SequenceState]:
        """Remove and return the waiting sequences that end without being computed, such as after a passed deadline."""
        for sequence in self._waiting.expired(self._clock()):
            self.finish_uncomputed(sequence, FinishReason.ABORT)
        ended, self._ended = self._ended, []
        for sequence in ended:
            self._retire(sequence.uid)
        return ended

    def schedule(self) -> StepPlan:
        """Admit waiting sequences, and plan the engine's next step. A `commit` with the sampled tokens must follow."""
        self._num_preemptions = self._num_prompt_tokens = 0
        self._scheduled_seconds = self._clock()
        budget, size = self._max_step_tokens, self._config.block_size
        if self._config.max_draft_tokens:
            draft_budget, draft_cost = self._draft_policy.limits(len(self._running))
        chunks: list[Chunk] = []
        prefilling: list[SequenceState] = []
        # A copy, because reserving blocks may preempt sequences at the end of the list.
        for sequence in tuple(self._running):
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            end = len(sequence.token_ids)
            if end - sequence.num_computed_tokens != 1:
                prefilling.append(sequence)
            elif budget and (end <= len(sequence.block_table) * size or self._reserve(sequence, end)):
                draft: tuple[int, ...] = ()
                if sequence.lookup is not None:
                    draft = self._draft(sequence, draft_budget, draft_cost)
                    draft_budget -= len(draft)
                chunks.append(self._plan(sequence, 1, draft))
                budget -= 1 + len(draft)
        max_prefill = self._prefill_budget.max_allowed_tokens(len(chunks))
        for sequence in prefilling:
            num_tokens = min(sequence.num_remaining_tokens, budget, max_prefill)
            if num_tokens == 0:
                break
            end = sequence.num_computed_tokens + num_tokens
            if sequence.status is SequenceStatus.RUNNING and self._reserve(sequence, end):
                chunks.append(self._plan(sequence, num_tokens))
                budget -= num_tokens
        queries = hits = cached = 0
        new: list[tuple[str, int]] = []
        while budget and self._waiting and len(self._running) < self._limit.num_sequences:
            if self._num_preemptions or (admitted := self._admit()) is None:
                break
            sequence, num_queried = admitted
            queries += num_queried
            hits += sequence.num_computed_tokens
            num_tokens = min(sequence.num_remaining_tokens, budget, max_prefill)
            chunks.append(self._plan(sequence, num_tokens))
            budget -= num_tokens
            if sequence.first_scheduled_seconds is None:
                cached += sequence.num_cached_tokens
                sequence.first_scheduled_seconds = self._clock()
                new.append((sequence.uid, sequence.attempt))
        if any(chunk.adapter for chunk in chunks):
            chunks.sort(key=attrgetter("adapter"))  # adjacent rows of one adapter share the loads of its weights
        return StepPlan(
            chunks=tuple(chunks),
            admitted=new,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_prompt_tokens=cached,
            num_prefix_queries=queries,
            num_prefix_hits=hits,
            num_preemptions=self._num_preemptions,
        )

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan`, which is still being computed: the next token of each sequence of `plan`.

        Return None if other sequences are running or may be admitted, if all sequences of `plan` reach their maximum
        length, or if too few KV blocks are free.

        A GPU idles while the host reads a step's tokens, commits and reports them, and plans the next step. A step of
        decodes needs only the sampled tokens of the previous step, which are already on the device. (Compare the
        overlap schedulers of SGLang and vLLM, both 2024.)

        A token sampled by `plan` may end its sequence. The sequence's row in the step launched ahead is then wasted,
        and `commit` ignores the row. The row writes to a block after all positions that the prefix cache knows. The
        next owner of the block overwrites it in a later step, and a device computes steps in order.
        """
        running = [self._running_sequence(chunk) for chunk in plan.chunks]
        if len(running) - running.count(None) < len(self._running):
            return None  # another sequence is running, which this plan lacks
        following = [
            (row, chunk, sequence)
            for row, (chunk, sequence) in enumerate(zip(plan.chunks, running, strict=True))
            if sequence is not None and chunk.num_known_tokens + 1 < sequence.max_length
        ]
        if not following or (self._waiting and len(following) < self._limit.num_sequences):
            return None
        size = self._config.block_size
        lacking = [s for _, chunk, s in following if chunk.num_known_tokens >= len(s.block_table) * size]
        blocks = self._pool.allocate(len(lacking))
        if blocks is None:
            return None
        for sequence, block in zip(lacking, blocks, strict=True):
            sequence.block_table.append(block)
        chunks: list[Chunk] = []
        for _, chunk, sequence in following:
            self._waiting.charge(sequence.tenant, 1)
            start, table, params = chunk.num_known_tokens, sequence.block_table, sequence.params
            adapter = sequence.adapter
            chunks.append(Chunk(sequence.uid, sequence.attempt, start, 1, True, (), table, params, adapter=adapter))
        return StepPlan(chunks=tuple(chunks), previous_rows=tuple([row for row, _, _ in following]))

    def has_running(self, plan: StepPlan) -> bool:
        """Return True if some sequence of a step plan is still running."""
        return any(self._running_sequence(chunk) is not None for chunk in plan.chunks)

    def commit(
        self, plan: StepPlan, token_ids: Sequence[int | None], non_finite: frozenset[int] = frozenset()
    ) -> list[SequenceUpdate]:
        """Append a step's sampled tokens to its sequences that are still running. Return an update for each of them.

        token_ids: sampled tokens; None where a sequence's rules allow no token. Tokens sampled after known tokens come
            first, in the order of the chunks. Tokens sampled after draft tokens follow.
        non_finite: indices of packed tokens with NaN or infinity. Drafts are cut before the first such draft token.
            Sequences with such known tokens must have ended, see `end_non_finite`.
        """
        now = self._clock()
        if self._config.max_draft_tokens and plan.chunks and all(chunk.is_decode for chunk in plan.chunks):
            self._draft_policy.observe(plan.num_rows, now - self._scheduled_seconds)
        self._prefill_budget.observe(plan, now - self._scheduled_seconds)
        updates: list[SequenceUpdate] = []
        num_decodes = num_decoded = end = sampled = 0
        drafted = sum([chunk.samples for chunk in plan.chunks])
        for chunk in plan.chunks:
            end += chunk.num_tokens
            rows: tuple[int, ...] = ()
            if chunk.samples:
                rows = (sampled, *range(drafted, drafted + len(chunk.draft))) if chunk.draft else (sampled,)
                sampled, drafted = sampled + 1, drafted + len(chunk.draft)
            if (sequence := self._running_sequence(chunk)) is None:
                continue
            if non_finite and chunk.draft:
                first = end - len(chunk.draft)
                rows = rows[: 1 + next((at for at in range(first, end) if at in non_finite), end) - first]
            num_known = chunk.num_known_tokens
            if plan.previous_rows:  # the token ids, and so the block hashes, were unknown when the step was planned
                self._register_blocks(sequence, num_known)
            sequence.num_computed_tokens += chunk.num_tokens - len(chunk.draft)
            if sequence.num_scored_tokens < sequence.num_prompt_tokens - 1:
                scored = min(sequence.num_computed_tokens, sequence.num_prompt_tokens - 1)
                sequence.num_scored_tokens = max(sequence.num_scored_tokens, scored)
            if rows:
                ends = sequence.append(token_ids[rows[0]], now)
                if chunk.draft and not ends:
                    ends = sequence.append_drafted([token_ids[row] for row in rows], chunk.draft, now)
            elif ends := not sequence.num_remaining_tokens:
                sequence.finish_reason = FinishReason.LENGTH
                sequence.first_token_seconds = now  # end of prefill: no token is sampled
            if chunk.start >= sequence.num_prompt_tokens and chunk.is_decode:
                num_decodes, num_decoded = num_decodes + 1, num_decoded + len(sequence.token_ids) - num_known
            if ends:
                self._retire(sequence.uid)
            updates.append(SequenceUpdate(sequence, chunk, rows))
        self._limit.observe(
            now - self._committed_seconds,
            num_sequences=len(plan.chunks),
            num_decodes=num_decodes,
            num_tokens=num_decoded,
        )
        self._committed_seconds = now
        self._scheduled_seconds = now  # the duration of a step launched ahead is measured from here
        return updates

    def preempt_all(self, plan: StepPlan) -> StepPlan:
        """Preempt the sequences of a step that lacked memory, to repeat it in steps of half as many tokens.

        Return an empty plan with the statistics. The limit on a step's tokens ends when no sequence is left.
        """
        preempted = [sequence for chunk in plan.chunks if (sequence := self._running_sequence(chunk)) is not None]
        for sequence in preempted:
            self._preempt(sequence)
        self._pool.forget()  # blocks of the failed step are in the prefix cache, and may not have been computed
        self._max_step_tokens = max(1, plan.num_tokens // 2)
        return StepPlan(chunks=(), num_preemptions=plan.num_preemptions + len(preempted))

    def end_non_finite(self, plan: StepPlan, non_finite: frozenset[int]) -> list[SequenceState]:
        """End the running sequences with NaN or infinity in a computed step, and return them. A `commit` must follow.

        The blocks that the step wrote for these sequences leave the prefix cache. Another sequence that shares the
        blocks is preempted, because attention may have spread NaN to all positions of the prompt.
        """
        ended: list[SequenceState] = []
        row = 0
        for chunk in plan.chunks:
            first, row = row, row + chunk.num_tokens
            sequence = self._running_sequence(chunk)
            if sequence is None or non_finite.isdisjoint(range(first, row - len(chunk.draft))):
                continue
            written = set(sequence.block_table[chunk.start // self._config.block_size :])
            self._pool.discard(written)
            self.finish(sequence, FinishReason.ERROR)
            ended.append(sequence)
            for other in [running for running in self._running if not written.isdisjoint(running.block_table)]:
                shared = next(index for index, block in enumerate(other.block_table) if block in written)
                self._pool.discard(other.block_table[shared:])
                self._preempt(other)
        return ended

    def finish(self, sequence: SequenceState, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence for a reason that token ids do not show: stop string, grammar, failure or cancellation."""
        # Replaces a reason that `commit` has set: a stop string ends before the last token.
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if sequence.status is not SequenceStatus.FINISHED:
            self._retire(sequence.uid)
            self._ended = [ended for ended in self._ended if ended is not sequence]

    def truncate(self, sequence: SequenceState, num_tokens: int, stop: str) -> None:
        """Cut a sequence to its first `num_tokens` tokens, whose text completes the stop string `stop`, and end it."""
        del sequence.token_ids[num_tokens:]
        self.finish(sequence, FinishReason.STOP, stop)

    def finish_uncomputed(
        self, sequence: SequenceState, reason: FinishReason, stop_reason: str | int | None = None
    ) -> None:
        """Mark a waiting sequence to end at the next `take_ended`. STOP replaces LENGTH; other earlier reasons stay."""
        if sequence.finish_reason is None:
            self._ended.append(sequence)
        elif sequence.finish_reason is not FinishReason.LENGTH or reason is not FinishReason.STOP:
            return
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason

    def log_prefix_cache(self) -> CacheLog:
        """Begin to record the changes of the prefix cache; return the `CacheLog` that collects them."""
        self._pool.log = log = CacheLog()
        return log

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache and the estimates of step durations. Required after a failed step."""
        self._pool.forget()
        self._prefill_budget.reset()
        self._limit.reset()

    def check_integrity(self) -> None:
        """Assert that each sequence is in exactly one queue, and that reference counts match block tables."""
        assert all(s.status is SequenceStatus.RUNNING for s in self._running)
        assert all(s.status is SequenceStatus.WAITING and not s.block_table for s in self._waiting)
        assert len(self._running) <= self._config.max_num_running
        assert self._running == sorted(self._running, key=by_rank), "running sequences are not sorted by rank"
        self._waiting.check_integrity()
        placed = [*self._running, *self._waiting]
        assert sorted(s.uid for s in placed) == sorted(self._sequences), "a sequence is lost or queued twice"
        self._pool.check_integrity([sequence.block_table for sequence in self._running])

    def _running_sequence(self, chunk: Chunk) -> SequenceState | None:
        """Return the sequence of a chunk; None if it has ended or was preempted since the chunk was planned."""
        sequence = self._sequences.get(chunk.uid)
        if sequence is None or sequence.attempt != chunk.attempt or sequence.status is not SequenceStatus.RUNNING:
            return None
        return sequence

    def _plan(self, sequence: SequenceState, num_tokens: int, draft: tuple[int, ...] = ()) -> Chunk:
        """Return the chunk of a sequence in the next step: its next `num_tokens` tokens, then its draft tokens.

        The chunk's full blocks enter the prefix cache before they are computed, so a planned sequence must not be
        preempted later in the same step. A forward pass writes all keys before it reads any, so sequences admitted to
        the same step can share the blocks.
        """
        start, token_ids, params = sequence.num_computed_tokens, sequence.token_ids, sequence.params
        end = start + num_tokens
        if end // self._config.block_size > sequence.num_registered_blocks:
            self._register_blocks(sequence, end)
        if start < sequence.num_prompt_tokens:
            self._num_prompt_tokens += min(end, sequence.num_prompt_tokens) - start
        self._waiting.charge(sequence.tenant, num_tokens)
        scored_start, scored_ids = 0, list[int]()
        if params.prompt_logprobs is not None:
            # After a preemption, recomputed positions already have their logprobs.
            scored_start = max(start, sequence.num_scored_tokens)
            scored_ids = token_ids[scored_start + 1 : min(end + 1, sequence.num_prompt_tokens)]
        num_pooled = 0
        if sequence.pooling is not None:
            is_last = sequence.pooling is Pooling.LAST
            num_pooled = int(end == sequence.num_prompt_tokens) if is_last else num_tokens
        return Chunk(
            sequence.uid,
            sequence.attempt,
            start,
            num_tokens + len(draft),
            end == len(token_ids) < sequence.max_length,
            token_ids[start:end],
            sequence.block_table,
            params,
            draft,
            sequence.forbidden_token_ids if params.min_tokens or sequence.rules is not None else (),
            sequence.rules,
            scored_start,
            scored_ids,
            num_pooled,
            sequence.adapter,
        )

    def _draft(self, sequence: SequenceState, budget: int, min_probability: float) -> tuple[int, ...]:
        """Return a sequence's draft tokens. Allocate a KV block for them if more blocks are free than sequences run."""
        if sequence.lookup is None or sequence.num_completion_tokens < sequence.params.min_tokens:
            return ()
        length, size = len(sequence.token_ids), self._config.block_size
        limit = min(budget, sequence.max_length - length - 1)
        draft = sequence.lookup.draft(sequence.token_ids, limit, min_probability)
        if length + len(draft) > len(sequence.block_table) * size and self._pool.num_free > len(self._running):
            sequence.block_table += self._pool.allocate(1) or []
        return draft[: max(0, len(sequence.block_table) * size - length)]

    def _reserve(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Allocate the missing KV blocks of a sequence's first `num_tokens` tokens. Return False if blocks are short.

        Running sequences of higher rank are preempted if needed.
        """
        missing = -(-num_tokens // self._config.block_size) - len(sequence.block_table)
        if missing <= 0:
            return True
        while self._pool.num_free < missing:
            last = self._running[-1]
            if last is sequence:
                return False
            self._preempt(last)
        blocks = self._pool.allocate(missing)
        assert blocks is not None
        sequence.block_table += blocks
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        """Move a sequence back to the waiting queue and free its blocks. Its tokens are recomputed later."""
        self._running.remove(sequence)
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = sequence.num_registered_blocks = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self._waiting.add(sequence)
        self._num_preemptions += 1

    def _admit(self) -> tuple[SequenceState, int] | None:
        """Admit the first waiting sequence, if enough KV blocks are free.

        Return the sequence, and how many of its tokens were looked up in the prefix cache; None: no sequence was
        admitted.
        """
        sequence = self._waiting.first()
        size = self._config.block_size
        known: list[int] = []
        num_queried = 0
        if self._config.enable_prefix_cache:
            num_queried = len(sequence.token_ids)
            # The last token is always computed: the next token is sampled from its logits.
            num_skippable, num_scored = num_queried - 1, sequence.num_scored_tokens
            if sequence.params.prompt_logprobs is not None and num_scored < sequence.num_prompt_tokens - 1:
                num_skippable = num_scored  # prompt logprobs need the logits of the other tokens
            if sequence.pooling is Pooling.MEAN:
                num_skippable = 0  # mean pooling needs every hidden state
            known = self._pool.find(sequence.full_block_hashes(num_skippable // size, size))
        needed = -(-len(sequence.token_ids) // size) - len(known)
        # Keep one spare block per running sequence, so that the admitted sequence is not preempted soon after.
        if self._pool.num_free - self._pool.num_free_among(known) < needed + len(self._running):
            return None
        self._pool.acquire(known)
        blocks = self._pool.allocate(needed)
        assert blocks is not None
        self._waiting.remove(sequence.tenant, sequence.rank)
        sequence.block_table = [*known, *blocks]
        sequence.num_computed_tokens = len(known) * size
        sequence.num_registered_blocks = len(known)
        if sequence.first_scheduled_seconds is None:
            sequence.num_cached_tokens = min(len(known) * size, sequence.num_prompt_tokens)
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=by_rank)
        return sequence, num_queried

    def _register_blocks(self, sequence: SequenceState, num_tokens: int) -> None:
        """Add to the prefix cache the blocks that are full once a sequence's first `num_tokens` tokens are computed."""
        num_full = num_tokens // self._config.block_size
        if num_full <= sequence.num_registered_blocks or not self._config.enable_prefix_cache:
            return
        hashes = sequence.full_block_hashes(num_full, self._config.block_size)
        first, size = sequence.num_registered_blocks, self._config.block_size
        num_new = sum(self._pool.register(sequence.block_table[i], hashes[i]) for i in range(first, num_full))
        if num_new and self._pool.log is not None and sequence.has_public_prefix:
            parent = hashes[first - 1] if first else None
            self._pool.log.store(hashes[first:], parent, sequence.token_ids[first * size : num_full * size])
        sequence.num_registered_blocks = num_full

    def _retire(self, uid: str) -> None:
        """Set an unfinished sequence to FINISHED: remove it from its queue and free its KV blocks."""
        sequence = self._sequences.pop(uid)
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._pool.free(sequence.block_table)
            sequence.block_table = []
        else:
            self._waiting.remove(sequence.tenant, sequence.rank)
        sequence.status = SequenceStatus.FINISHED
