"""Who computes how much in the next step. Pure Python: integers in, integers out.

There are no phases. A sequence has `num_computed_tokens` and must catch up with its tokens; a step has one budget of
`max_batched_tokens`, which serves sequences that are one token behind first (decode) and spends the rest on longer
arrears (prompts), oldest first, of each no more than `prompt_pace` allows. Continuous batching, chunked prefill, prefix
hits and going on after a preemption or a crash are all this one rule. (The idea is vLLM's; Kwon et al. 2023, Agrawal et
al. 2023, arXiv 2308.16369.)

Why nothing starves: of those that run, what ranks first (by arrival, but for priorities: `service.engine.sequence`) is
served first and may take blocks from whatever ranks later, and every sequence that is let in fits the pool alone. So
the first always goes on, ends, and the next is first; and new arrivals rank later and later. Nobody is thrown out for
a place among those that run: who gets the next one says `service.engine.fair_queue`, by turns among owners, by rank
among the sequences of each. `service.engine.running_limit` says how many run at once.
"""

import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping

from service.engine.block_pool import BlockPool
from service.engine.config import EngineConfig
from service.engine.drafting import Drafting
from service.engine.endings import Endings
from service.engine.fair_queue import FairQueue
from service.engine.lookahead import goes_on, plan_ahead
from service.engine.plan import Chunk, StepPlan, step_plan
from service.engine.prefix_cache import PrefixCache
from service.engine.prompt_pace import PromptPace
from service.engine.running_limit import RunningLimit
from service.engine.sequence import Sequence, SequenceStatus, by_rank
from service.messages import FinishReason


class Scheduler:
    """Owner of all sequences and of the block pool.

    Args:
        max_context_length: positions of the model; a sequence ends there.
        eos_token_ids: what ends a text, any of them.
        clock: seconds; `time.monotonic` but in tests.
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
        self._endings = Endings(eos_token_ids)
        self._clock = clock
        self._pool = BlockPool(config.num_blocks)
        self._prefix_cache = PrefixCache(self._pool, config)
        self._drafting = Drafting(config, self._pool)
        self._pace = PromptPace(config.prompt_slowdown)
        self._limit = RunningLimit(config.target_itl_seconds, config.max_num_running)
        self._scheduled_seconds = self._committed_seconds = 0.0
        self._sequences: dict[str, Sequence] = {}
        self._waiting = FairQueue()
        self._running: list[Sequence] = []  # by rank
        self._ended: list[Sequence] = []
        self._num_with_deadline = 0
        self._num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that own no blocks yet, or no more."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that own blocks."""
        return len(self._running)

    @property
    def max_num_running(self) -> int:
        """Limit on running sequences, see `service.engine.running_limit`."""
        return self._limit.num_sequences

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody owns."""
        return self._pool.num_free

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running or self._ended)

    def sequences(self) -> list[Sequence]:
        """All unfinished sequences."""
        return list(self._sequences.values())

    def get(self, uid: str) -> Sequence | None:
        """The unfinished sequence of that uid."""
        return self._sequences.get(uid)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn.

        Raises:
            ValueError: it could never be computed: empty, longer than the context, larger than the pool, or known.
        """
        length, limit = len(sequence.token_ids), self._max_context_length
        if sequence.uid in self._sequences:
            raise ValueError(f"sequence {sequence.uid} is already here")
        if not 1 <= sequence.num_prompt_tokens <= limit or length > limit:
            raise ValueError(f"a prompt of {length} tokens; the context holds 1 to {limit}")
        capacity = self._config.num_blocks * self._config.block_size
        if sequence.max_length > capacity:
            raise ValueError(f"up to {sequence.max_length} tokens; the KV-cache holds {capacity}")
        self._sequences[sequence.uid] = sequence
        self._waiting.add(sequence)
        self._num_with_deadline += sequence.deadline_seconds is not None
        if sequence.num_prior_tokens and self._endings.ends(sequence):
            self._ended.append(sequence)  # only its ending was lost

    def cancel(self, uid: str) -> bool:
        """Forget a sequence; its blocks are free at once. Returns whether it was here."""
        sequence = self._sequences.get(uid)
        if sequence is None:
            return False
        self.finish(sequence, FinishReason.ABORT)
        return True

    def schedule(self) -> StepPlan:
        """Decide the next step. `commit` must follow, with the tokens drawn."""
        self._num_preemptions = 0
        self._scheduled_seconds = self._clock()
        ended = self._take_ended()
        budget, size = self._config.max_batched_tokens, self._config.block_size
        self._drafting.begin(len(self._running))
        chunks: list[Chunk] = []
        behind: list[Sequence] = []
        # Copies: whoever is served may preempt from the end of the list.
        for sequence in tuple(self._running):
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            end = len(sequence.token_ids)
            if end - sequence.num_computed_tokens != 1:
                behind.append(sequence)
            elif budget and (end <= len(sequence.block_table) * size or self._reserve(sequence, end)):
                draft = self._drafting.draft(sequence) if sequence.lookup is not None else ()
                chunks.append(self._plan(sequence, 1, draft))
                budget -= 1 + len(draft)
        most = self._pace.most_tokens(len(chunks))
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
        """Decide the step after one that is being computed; None where more is to be decided than its sequences' next
        tokens. `commit` must follow of both, of the later one without the sequences that end in the first."""
        self._end_expired()
        may_admit = self._waiting and sum(map(goes_on, plan.chunks)) < self._limit.num_sequences
        if self._ended or may_admit:
            return None
        ahead = plan_ahead(plan, self._pool, self._config.block_size, num_running=len(self._running))
        for chunk in () if ahead is None else ahead.chunks:
            self._waiting.charge(chunk.sequence.owner, 1)
        return ahead

    def commit(self, plan: StepPlan, token_ids: Iterable[int | None]) -> list[Sequence]:
        """Take up what a step computed: the drawn tokens, as `StepPlan.drawn_rows` say whose.

        None is drawn where no token may come next. Returns the sequences that ended, their blocks already free.
        """
        drawn = list(token_ids)
        now = self._clock()
        self._drafting.observe(plan, now - self._scheduled_seconds)
        self._pace.observe(plan, now - self._scheduled_seconds)
        finished: list[Sequence] = []
        for chunk, rows in zip(plan.chunks, plan.drawn_rows, strict=True):
            sequence = chunk.sequence
            if plan.after_rows:  # its tokens were not known when it was planned
                self._prefix_cache.register(sequence, chunk.num_known_tokens)
            sequence.num_computed_tokens += chunk.num_tokens - len(chunk.draft)
            if sequence.num_scored_tokens < sequence.num_prompt_tokens - 1:
                scored = min(sequence.num_computed_tokens, sequence.num_prompt_tokens - 1)
                sequence.num_scored_tokens = max(sequence.num_scored_tokens, scored)
            if rows:
                ends = self._endings.take(chunk, [drawn[row] for row in rows], now)
            else:
                ends = not sequence.num_remaining_tokens
                if ends:
                    sequence.finish_reason = FinishReason.LENGTH
                    sequence.first_token_seconds = now  # the prompt's end, which no token follows
            if ends:
                self._retire(sequence)
                finished.append(sequence)
        self._limit.observe(plan, now - self._committed_seconds)
        self._committed_seconds = now
        self._scheduled_seconds = now  # of a step ahead, which takes its time from here on
        return finished

    def end_non_finite(self, plan: StepPlan, starts: Mapping[str, int]) -> list[Sequence]:
        """End the sequences of a computed step whose numbers are NaN or infinite; `commit` follows without them.

        Keys and values that the step wrote for them are not found again. A sequence that was to share these blocks in
        the same step is preempted: attention may have spread NaN to all positions of the prompt, shared ones included.

        Args:
            starts: uid -> the first position that the step computed.
        """
        ended: list[Sequence] = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.uid not in starts or sequence.status is not SequenceStatus.RUNNING:
                continue  # a step launched ahead still has sequences that have ended; a preempted one is computed again
            spoiled = set(sequence.block_table[starts[sequence.uid] // self._config.block_size :])
            self._prefix_cache.discard(spoiled)
            self.finish(sequence, FinishReason.ERROR)
            ended.append(sequence)
            for other in [running for running in self._running if not spoiled.isdisjoint(running.block_table)]:
                first = next(place for place, block in enumerate(other.block_table) if block in spoiled)
                self._prefix_cache.discard(other.block_table[first:])
                self._preempt(other)
        return ended

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence for a reason that is not in its ids: a stop string, or a failure.

        One that `commit` has ended already keeps no other reason than this one: its text ended first.
        """
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if sequence.status is not SequenceStatus.FINISHED:
            self._retire(sequence)
            self._ended = [ended for ended in self._ended if ended is not sequence]

    def end(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Let the next step end a sequence without computing it. Its ending stays, but a stop comes before a length."""
        if sequence.finish_reason is None:
            self._ended.append(sequence)
        elif sequence.finish_reason is not FinishReason.LENGTH or reason is not FinishReason.STOP:
            return
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, and what steps took. Must follow one that failed between `schedule` and `commit`."""
        self._prefix_cache.forget()
        self._pace.forget()
        self._limit.forget()

    def forbidden_token_ids(self, sequence: Sequence) -> tuple[int, ...]:
        """What the next draw must avoid, see `Endings.forbidden`."""
        return self._endings.forbidden(sequence)

    def check_integrity(self) -> None:
        """Every sequence is in one place, and every block is owned by who has it in its table, or free.

        Raises:
            AssertionError: a bug of ours.
        """
        assert all(s.status is SequenceStatus.RUNNING for s in self._running)
        assert all(s.status is SequenceStatus.WAITING and not s.block_table for s in self._waiting)
        assert len(self._running) <= self._config.max_num_running
        assert self._running == sorted(self._running, key=by_rank), "sequences do not stand by rank"
        self._waiting.check_integrity()
        placed = [*self._running, *self._waiting]
        assert sorted(s.uid for s in placed) == sorted(self._sequences), "a sequence is lost or stands twice"
        assert sum(s.deadline_seconds is not None for s in placed) == self._num_with_deadline
        self._pool.check_integrity([sequence.block_table for sequence in self._running])

    def _take_ended(self) -> tuple[Sequence, ...]:
        """Retire what ends without computing."""
        self._end_expired()
        ended, self._ended = tuple(self._ended), []
        for sequence in ended:
            self._retire(sequence)
        return ended

    def _end_expired(self) -> None:
        """What has not begun by its deadline ends."""
        if self._num_with_deadline:
            for sequence in self._waiting.expired(self._clock()):
                self.end(sequence, FinishReason.ABORT)

    def _plan(self, sequence: Sequence, num_tokens: int, draft: tuple[int, ...] = ()) -> Chunk:
        """Have this step compute the next tokens of a sequence. What is planned is not preempted any more."""
        start = sequence.num_computed_tokens
        end = start + num_tokens
        if end // self._config.block_size > sequence.num_registered_blocks:
            self._prefix_cache.register(sequence, end)
        self._waiting.charge(sequence.owner, num_tokens)
        draws = end == len(sequence.token_ids) < sequence.max_length
        return Chunk(sequence, start, num_tokens + len(draft), draws, draft)

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow a block table to hold `num_tokens`, at the expense of sequences that rank later if need be.

        A sequence that finds none keeps what it has and sits this step out: what ranks earlier goes on.
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

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, without blocks; its tokens stay and will be computed again."""
        self._running.remove(sequence)
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = sequence.num_registered_blocks = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self._waiting.add(sequence)
        self._num_preemptions += 1

    def _admit(self) -> tuple[Sequence, int] | None:
        """Give the first waiting sequence blocks for all its tokens, known prefixes shared; None if they are short.

        Returns it with the number of tokens looked up in the prefix cache.
        """
        sequence = self._waiting.first()
        size = self._config.block_size
        known, num_queried = self._prefix_cache.find(sequence)
        needed = -(-len(sequence.token_ids) // size) - len(known)
        # One spare block for each that runs: to let a prompt in and throw it out again soon is work for nothing.
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

    def _retire(self, sequence: Sequence) -> None:
        """Out of every list, without blocks."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._pool.free(sequence.block_table)
            sequence.block_table = []
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.uid]
        self._num_with_deadline -= sequence.deadline_seconds is not None
