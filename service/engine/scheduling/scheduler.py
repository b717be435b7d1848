"""Scheduler: chooses the sequences and tokens that the next step computes. Pure Python on integers.

There are no separate prefill and decode phases. Each sequence has `num_computed_tokens`, which must catch up with its
number of tokens. A step has one budget of `max_batched_tokens`. Sequences that lack one token (decodes) are served
first. The rest of the budget goes to longer prefills in rank order, limited per sequence by `prefill_budget`. This rule
covers continuous batching, chunked prefill, prefix-cache hits, and resumption after a preemption or a crash. (vLLM:
Kwon et al. 2023, arXiv 2309.06180. Sarathi: Agrawal et al. 2023, arXiv 2308.16369.)

Running sequences do not starve. The sequence of lowest rank (`service.engine.scheduling.sequence`) is served first and
may preempt sequences of higher rank, and every admitted sequence fits the pool alone. So the first sequence always
makes progress and ends, and newer arrivals rank later. A waiting sequence never preempts a running one.
`service.engine.scheduling.fair_queue` chooses the next sequence to admit: fair among tenants, by rank within a tenant.
`service.engine.scheduling.running_limit` sets the number of running sequences.
"""

import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping

from service.engine.scheduling.block_pool import BlockPool
from service.engine.scheduling.config import EngineConfig
from service.engine.scheduling.draft_policy import DraftPolicy
from service.engine.scheduling.fair_queue import FairQueue
from service.engine.scheduling.lookahead import may_continue, plan_ahead
from service.engine.scheduling.prefill_budget import PrefillBudget
from service.engine.scheduling.prefix_cache import PrefixCache
from service.engine.scheduling.running_limit import RunningLimit
from service.engine.scheduling.sequence import SequenceState, SequenceStatus, by_rank
from service.engine.scheduling.step_plan import Chunk, StepPlan, step_plan
from service.engine.scheduling.stop_conditions import StopConditions
from service.ipc.messages import FinishReason


class Scheduler:
    """Scheduler of all sequences, with the block pool.

    Args:
        config: sizes and budgets.
        max_context_length: maximum number of tokens of a sequence, prompt included.
        eos_token_ids: end-of-sequence tokens of the model.
        clock: time in seconds; tests replace `time.monotonic`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_context_length: int,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._max_context_length = max_context_length
        self._stop_conditions = StopConditions(eos_token_ids)
        self._clock = clock
        self._pool = BlockPool(config.num_blocks)
        self._prefix_cache = PrefixCache(self._pool, config)
        self._draft_policy = DraftPolicy(config, self._pool)
        self._prefill_budget = PrefillBudget(config.prompt_slowdown)
        self._limit = RunningLimit(config.target_itl_seconds, config.max_num_running)
        self._scheduled_seconds = self._committed_seconds = 0.0
        self._sequences: dict[str, SequenceState] = {}
        self._waiting = FairQueue()
        self._running: list[SequenceState] = []  # by rank
        self._ended: list[SequenceState] = []
        self._num_with_deadline = 0
        self._num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences: not yet admitted, or preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of running sequences, which own blocks."""
        return len(self._running)

    @property
    def max_num_running(self) -> int:
        """Limit on running sequences, see `service.engine.scheduling.running_limit`."""
        return self._limit.num_sequences

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks, cached blocks included."""
        return self._pool.num_free

    @property
    def has_work(self) -> bool:
        """True if a step has something to compute or to end."""
        return bool(self._waiting or self._running or self._ended)

    def sequences(self) -> list[SequenceState]:
        """Return all unfinished sequences."""
        return list(self._sequences.values())

    def get(self, uid: str) -> SequenceState | None:
        """Return the unfinished sequence of a uid, or None."""
        return self._sequences.get(uid)

    def add(self, sequence: SequenceState) -> None:
        """Add a sequence to the waiting queue.

        Raises:
            ValueError: the prompt is empty, the sequence exceeds the context or the pool, or its uid is in use.
        """
        length, limit = len(sequence.token_ids), self._max_context_length
        if sequence.uid in self._sequences:
            raise ValueError(f"the uid {sequence.uid} is in use by another sequence")
        if not 1 <= sequence.num_prompt_tokens <= limit or length > limit:
            raise ValueError(f"the prompt has {length} tokens; the context holds 1 to {limit}")
        capacity = self._config.num_blocks * self._config.block_size
        if sequence.max_length > capacity:
            raise ValueError(f"the sequence may reach {sequence.max_length} tokens; the KV-cache holds {capacity}")
        self._sequences[sequence.uid] = sequence
        self._waiting.add(sequence)
        self._num_with_deadline += sequence.deadline_seconds is not None
        if sequence.num_prior_tokens and self._stop_conditions.ends(sequence):
            self._ended.append(sequence)  # the previous attempt had sampled all tokens, and only its ending was lost

    def cancel(self, uid: str) -> bool:
        """Remove a sequence and free its blocks. Return False if the uid is unknown."""
        sequence = self._sequences.get(uid)
        if sequence is None:
            return False
        self.finish(sequence, FinishReason.ABORT)
        return True

    def schedule(self) -> StepPlan:
        """Plan the next step. A `commit` with the sampled tokens must follow."""
        self._num_preemptions = 0
        self._scheduled_seconds = self._clock()
        ended = self._take_ended()
        budget, size = self._config.max_batched_tokens, self._config.block_size
        self._draft_policy.begin(len(self._running))
        chunks: list[Chunk] = []
        behind: list[SequenceState] = []
        # A copy, because reserving blocks may preempt sequences at the end of the list.
        for sequence in tuple(self._running):
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            end = len(sequence.token_ids)
            if end - sequence.num_computed_tokens != 1:
                behind.append(sequence)
            elif budget and (end <= len(sequence.block_table) * size or self._reserve(sequence, end)):
                draft = self._draft_policy.draft(sequence) if sequence.lookup is not None else ()
                chunks.append(self._plan(sequence, 1, draft))
                budget -= 1 + len(draft)
        most = self._prefill_budget.max_allowed_tokens(len(chunks))
        for sequence in behind:
            wanted = min(sequence.num_remaining_tokens, budget, most)
            if wanted == 0:
                break
            end = sequence.num_computed_tokens + wanted
            if sequence.status is SequenceStatus.RUNNING and self._reserve(sequence, end):
                chunks.append(self._plan(sequence, wanted))
                budget -= wanted
        queries = hits = cached = 0
        while budget and self._waiting and len(self._running) < self._limit.num_sequences:
            if self._num_preemptions or (admitted := self._admit()) is None:
                break
            sequence, num_queried = admitted
            queries += num_queried
            hits += sequence.num_computed_tokens
            cached += sequence.num_cached_tokens if sequence.first_scheduled_seconds is None else 0
            wanted = min(sequence.num_remaining_tokens, budget, most)
            chunks.append(self._plan(sequence, wanted))
            budget -= wanted
            if sequence.first_scheduled_seconds is None:
                sequence.first_scheduled_seconds = self._clock()
        return step_plan(
            chunks,
            ended=ended,
            num_cached_prompt_tokens=cached,
            num_prefix_queries=queries,
            num_prefix_hits=hits,
            num_preemptions=self._num_preemptions,
        )

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after a step that is still being computed; None if it cannot be only the next decode.

        A `commit` of both steps must follow. The second commit must omit sequences that end in the first step.
        """
        self._end_expired()
        may_admit = self._waiting and sum(map(may_continue, plan.chunks)) < self._limit.num_sequences
        if self._ended or may_admit:
            return None
        ahead = plan_ahead(plan, self._pool, self._config.block_size, num_running=len(self._running))
        for chunk in () if ahead is None else ahead.chunks:
            self._waiting.charge(chunk.sequence.tenant, 1)
        return ahead

    def commit(self, plan: StepPlan, token_ids: Iterable[int | None]) -> list[SequenceState]:
        """Append the sampled tokens of a step to their sequences and return the sequences that ended.

        The blocks of ended sequences are free.

        Args:
            token_ids: sampled tokens, assigned to chunks by `StepPlan.sampled_rows`; None if no token may follow.
        """
        sampled = list(token_ids)
        now = self._clock()
        self._draft_policy.observe(plan, now - self._scheduled_seconds)
        self._prefill_budget.observe(plan, now - self._scheduled_seconds)
        finished: list[SequenceState] = []
        for chunk, rows in zip(plan.chunks, plan.sampled_rows, strict=True):
            sequence = chunk.sequence
            if plan.previous_rows:  # the token ids, and so the block hashes, were unknown when the step was planned
                self._prefix_cache.register(sequence, chunk.num_known_tokens)
            sequence.num_computed_tokens += chunk.num_tokens - len(chunk.draft)
            if sequence.num_scored_tokens < sequence.num_prompt_tokens - 1:
                scored = min(sequence.num_computed_tokens, sequence.num_prompt_tokens - 1)
                sequence.num_scored_tokens = max(sequence.num_scored_tokens, scored)
            if rows:
                ends = self._stop_conditions.append(chunk, [sampled[row] for row in rows], now)
            else:
                ends = not sequence.num_remaining_tokens
                if ends:
                    sequence.finish_reason = FinishReason.LENGTH
                    sequence.first_token_seconds = now  # end of prefill: no token is sampled
            if ends:
                self._retire(sequence)
                finished.append(sequence)
        self._limit.observe(plan, now - self._committed_seconds)
        self._committed_seconds = now
        self._scheduled_seconds = now  # a step launched ahead counts from here
        return finished

    def end_non_finite(self, plan: StepPlan, starts: Mapping[str, int]) -> list[SequenceState]:
        """End the sequences whose numbers in a computed step are NaN or infinite. `commit` must follow without them.

        The blocks that the step wrote for them leave the prefix cache. Another sequence that shares these blocks is
        preempted, because attention may have spread NaN to all positions of the prompt.

        Args:
            starts: uid to the first position that the step computed.
        """
        ended: list[SequenceState] = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.uid not in starts or sequence.status is not SequenceStatus.RUNNING:
                continue  # ended since the step was launched ahead, or preempted and computed again later
            spoiled = set(sequence.block_table[starts[sequence.uid] // self._config.block_size :])
            self._prefix_cache.discard(spoiled)
            self.finish(sequence, FinishReason.ERROR)
            ended.append(sequence)
            for other in [running for running in self._running if not spoiled.isdisjoint(running.block_table)]:
                first = next(index for index, block in enumerate(other.block_table) if block in spoiled)
                self._prefix_cache.discard(other.block_table[first:])
                self._preempt(other)
        return ended

    def finish(self, sequence: SequenceState, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence for a reason outside its token ids: a stop string, a failure or a cancellation.

        The reason replaces a reason that `commit` has set, because a stop string ends before the last token.
        """
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if sequence.status is not SequenceStatus.FINISHED:
            self._retire(sequence)
            self._ended = [ended for ended in self._ended if ended is not sequence]

    def end(self, sequence: SequenceState, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Let the next step end a sequence without computing it.

        An earlier reason is kept, except that STOP replaces LENGTH.
        """
        if sequence.finish_reason is None:
            self._ended.append(sequence)
        elif sequence.finish_reason is not FinishReason.LENGTH or reason is not FinishReason.STOP:
            return
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache and the estimates of step durations.

        Must follow a step that failed between `schedule` and `commit`.
        """
        self._prefix_cache.forget()
        self._prefill_budget.forget()
        self._limit.forget()

    def forbidden_token_ids(self, sequence: SequenceState) -> tuple[int, ...]:
        """Return the tokens that must not be sampled next, see `StopConditions.forbidden`."""
        return self._stop_conditions.forbidden(sequence)

    def check_integrity(self) -> None:
        """Check that each sequence is in exactly one queue, and that block tables match the reference counts.

        Raises:
            AssertionError: the scheduler's state is inconsistent.
        """
        assert all(s.status is SequenceStatus.RUNNING for s in self._running)
        assert all(s.status is SequenceStatus.WAITING and not s.block_table for s in self._waiting)
        assert len(self._running) <= self._config.max_num_running
        assert self._running == sorted(self._running, key=by_rank), "running sequences are not sorted by rank"
        self._waiting.check_integrity()
        placed = [*self._running, *self._waiting]
        assert sorted(s.uid for s in placed) == sorted(self._sequences), "a sequence is lost or queued twice"
        assert sum(s.deadline_seconds is not None for s in placed) == self._num_with_deadline
        self._pool.check_integrity([sequence.block_table for sequence in self._running])

    def _take_ended(self) -> tuple[SequenceState, ...]:
        """Retire and return the sequences that end without computation."""
        self._end_expired()
        ended, self._ended = tuple(self._ended), []
        for sequence in ended:
            self._retire(sequence)
        return ended

    def _end_expired(self) -> None:
        """End the waiting sequences that have never run and whose deadline has passed."""
        if self._num_with_deadline:
            for sequence in self._waiting.expired(self._clock()):
                self.end(sequence, FinishReason.ABORT)

    def _plan(self, sequence: SequenceState, num_tokens: int, draft: tuple[int, ...] = ()) -> Chunk:
        """Plan the next `num_tokens` tokens of a sequence, then its draft.

        The blocks become findable at once, so a planned sequence must not be preempted later in the same step.
        """
        start = sequence.num_computed_tokens
        end = start + num_tokens
        if end // self._config.block_size > sequence.num_registered_blocks:
            self._prefix_cache.register(sequence, end)
        self._waiting.charge(sequence.tenant, num_tokens)
        draws = end == len(sequence.token_ids) < sequence.max_length
        return Chunk(sequence, start, num_tokens + len(draft), draws, draft)

    def _reserve(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Allocate blocks for the first `num_tokens` tokens. Preempt sequences of higher rank if blocks are short.

        Return False if blocks are still short. The sequence then keeps its blocks and skips this step.
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
        """Admit the first waiting sequence with blocks for all its tokens; None if blocks are short.

        Cached blocks are shared. Return the sequence and the number of tokens looked up in the prefix cache.
        """
        sequence = self._waiting.first()
        size = self._config.block_size
        known, num_queried = self._prefix_cache.find(sequence)
        needed = -(-len(sequence.token_ids) // size) - len(known)
        # Keep one spare block per running sequence, so that the admitted sequence is not preempted soon after.
        if self._pool.num_free - self._pool.num_free_among(known) < needed + len(self._running):
            return None
        self._pool.acquire(known)
        blocks = self._pool.allocate(needed)
        assert blocks is not None
        self._waiting.remove(sequence)
        sequence.block_table = [*known, *blocks]
        sequence.num_computed_tokens = len(known) * size
        sequence.num_registered_blocks = len(known)
        if sequence.first_scheduled_seconds is None:
            sequence.num_cached_tokens = min(len(known) * size, sequence.num_prompt_tokens)
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=by_rank)
        return sequence, num_queried

    def _retire(self, sequence: SequenceState) -> None:
        """Remove a sequence from its queue and free its blocks."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._pool.free(sequence.block_table)
            sequence.block_table = []
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.uid]
        self._num_with_deadline -= sequence.deadline_seconds is not None
