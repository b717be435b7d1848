"""Admission control: admit a request into the queue, or reject it with a Retry-After.

Three bounds apply: the number of sequences, the number of waiting tokens, and the predicted wait for a slot. The bound
on the wait keeps the service fast for admitted requests, since a permanent queue adds latency and no throughput. The
bound on the wait is not applied while slots are free or before a rate is known. It is replaced by the request's timeout
for a tenant with nothing waiting and less than an even share of the slots.

The next few free slots are predicted from the remaining tokens of running sequences
(`service.admission.slot_forecast`). Later slots are predicted from the recent rate of sequence starts. The mean rate
alone would be off by a factor of two or more for the next slot or two, because endings cluster by chance. A short queue
is about those first slots.

Capacity is shared among tenants by dynamic thresholds (Choudhury and Hahne 1998, IEEE/ACM Trans. Networking 6(2)). A
tenant may hold at most four times the capacity that is left, out of 5/4 of the configured limit. A single tenant thus
gets the whole configured limit, and the extra quarter is kept for further tenants. Two tenants that flood the server
get 5/9 of the limit each, and a third tenant still finds capacity.

A retry of a rejected request gets slightly higher bounds than a first attempt.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.admission.queue_policy import QueuePolicy
from service.admission.rate_estimator import Rate
from service.admission.retry_tracker import RetryTracker
from service.admission.slot_forecast import RunningResponse, SlotForecast
from service.protocol.errors import Overloaded, WaitTooLong

# The OpenAI SDKs ignore a Retry-After of over two minutes.
_MAX_RETRY_AFTER_SECONDS = 120.0
# Shortest Retry-After: a new connection and a request take some milliseconds by themselves.
_MIN_RETRY_AFTER_SECONDS = 0.02
# Largest holding of a tenant, as a multiple of the capacity that is left.
_THRESHOLD = 4
# Load (admitted sequences per slot) from which starts count toward the start rate of a full server.
_FULL = 7 / 8
# Steps from arrival to first token on an idle queue, about: the rest of the current step, and the prefill step.
_PROMPT_STEPS = 2
# Retry-After is lengthened by up to this share at random, so that requests rejected together do not retry together.
_SPREAD = 0.25
# Extra capacity and patience for a retry, as a share.
_RETURN_BONUS = 0.25


@dataclass(slots=True)
class _Holding:
    """Admitted sequences of one tenant."""

    num_sequences: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Demand:
    """Demand of one request: the number of its sequences, and their tokens together."""

    num_sequences: int
    num_tokens: int
    terms: QueuePolicy


@dataclass(frozen=True, slots=True)
class _Shortage:
    """Reason for a rejection, and the seconds until the request should fit.

    wait_seconds: the predicted wait, if it is the reason; else None.
    """

    seconds: float
    wait_seconds: float | None = None


class Admission:
    """Admission control by the number of sequences that were admitted and have not ended.

    A sequence counts as waiting until its first event from the engine. The `num_tokens` of a sequence is its upper
    limit: prompt plus max_tokens.

    Args:
        observe_error: receives the error of each checked Retry-After in seconds, see `RetryTracker`.
        draw: returns a random number from 0 to 1, which spreads the Retry-After values.
    """

    def __init__(
        self,
        *,
        max_num_running: int,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        observe_error: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.max_num_sequences = max_num_running + max_waiting_requests
        self._most_running = self._max_num_running = max_num_running
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._random = draw
        self._last_seconds = clock()
        self._finished, self._started_tokens = Rate(), Rate()
        self._started = Rate()  # sequence starts, while the server is about full
        self._forecast = SlotForecast()
        self._retry_tracker: RetryTracker[_Demand] = RetryTracker(observe_error)
        self._holdings: dict[str, _Holding] = {}
        self.num_sequences = 0
        self.num_waiting_tokens = 0
        self._num_running = 0

    def admit(self, token_counts: list[int], terms: QueuePolicy | None = None) -> None:
        """Admit all sequences of one request, or none. An idle server admits any request.

        Raises:
            Overloaded: the bound on sequences or tokens is reached; carries a Retry-After.
            WaitTooLong: the predicted wait is longer than the request allows; carries a Retry-After.
        """
        terms = QueuePolicy() if terms is None else terms
        self._advance()
        if terms.is_retry:
            self._retry_tracker.returned(terms.tenant)
        asked = _Demand(len(token_counts), sum(token_counts), terms)
        if (shortage := self._shortage(asked)) is not None:
            raise self._rejection(asked, shortage)
        holding = self._holdings.setdefault(terms.tenant, _Holding())
        holding.num_sequences += asked.num_sequences
        holding.num_waiting += asked.num_sequences
        holding.num_waiting_tokens += asked.num_tokens
        self.num_sequences += asked.num_sequences
        self.num_waiting_tokens += asked.num_tokens

    def reject_by_headers(self, terms: QueuePolicy) -> None:
        """Reject a request by its terms alone, if not even the smallest request would be admitted.

        Raises:
            Overloaded, WaitTooLong: as in `admit`.
        """
        self._advance()
        asked = _Demand(1, 1, terms)
        if (shortage := self._shortage(asked)) is not None:
            if terms.is_retry:
                self._retry_tracker.returned(terms.tenant)
            raise self._rejection(asked, shortage)

    def started(self, num_tokens: int, tenant: str = "", answer: RunningResponse | None = None) -> None:
        """Record that a waiting sequence of `num_tokens` tokens has begun.

        Args:
            answer: the running completion, if it holds a slot.
        """
        self._advance(tokens=num_tokens, begun=1)
        self._num_running += 1
        if answer is not None:
            self._forecast.take(answer)
        holding = self._holdings[tenant]
        holding.num_waiting -= 1
        holding.num_waiting_tokens -= num_tokens
        self.num_waiting_tokens -= num_tokens
        self._watch()

    def limit_running(self, max_num_running: int | None) -> None:
        """Adopt the engine's current limit on running sequences; None: the configured limit."""
        most = self._most_running
        self._max_num_running = most if max_num_running is None else min(max_num_running, most)

    def stepped(self, token_counts: Sequence[int]) -> None:
        """Record an engine step by the number of new tokens of each completion. Zeros are ignored: no token came."""
        if counts := [count for count in token_counts if count]:
            self._advance()
            self._forecast.step(sum(counts) / len(counts))

    def ended(self, tenant: str = "", answer: RunningResponse | None = None) -> None:
        """Record that a sequence has ended, for whatever reason, after `started` was called for it."""
        self._advance(sequences=1)
        self._num_running -= 1
        if answer is not None:
            self._forecast.leave(answer)
        self._holdings[tenant].num_sequences -= 1
        if not self._holdings[tenant].num_sequences:
            del self._holdings[tenant]
        self.num_sequences -= 1
        self._watch()

    def retry_after(self, token_counts: list[int], terms: QueuePolicy) -> float:
        """Return the Retry-After of a request that is rejected elsewhere, in seconds."""
        asked = _Demand(len(token_counts), sum(token_counts), terms)
        shortage = self._shortage(asked)
        return self._retry_after(asked, 0.0 if shortage is None else shortage.seconds)

    def _retry_after(self, asked: _Demand, seconds: float) -> float:
        """Return the Retry-After of a request that would fit in `seconds` if no other client retried; record it.

        Expected retries of the same tenant are served first, which lengthens the Retry-After.
        """
        now, tenant = self._clock(), asked.terms.tenant
        if num_expected := self._retry_tracker.num_expected(tenant, now):
            rate = self._started if self._started.is_known else self._finished
            seconds += rate.seconds_for(num_expected)
        seconds *= 1.0 + _SPREAD * self._random()
        seconds = min(max(seconds, _MIN_RETRY_AFTER_SECONDS), _MAX_RETRY_AFTER_SECONDS)
        self._retry_tracker.refused(tenant, asked, num_sequences=asked.num_sequences, now=now, seconds=seconds)
        return seconds

    def _rejection(self, asked: _Demand, shortage: _Shortage) -> Overloaded:
        """Return the error of a request that does not fit."""
        seconds = self._retry_after(asked, shortage.seconds)
        if shortage.wait_seconds is not None:
            return WaitTooLong(
                f"the request would wait about {shortage.wait_seconds:.1f} s, longer than "
                f"{asked.terms.patience_seconds:g} s; try again later, or set a larger timeout",
                retry_after_seconds=seconds,
            )
        return Overloaded(
            f"the server is full: {self.num_sequences} completions are running or waiting; try again later",
            retry_after_seconds=seconds,
        )

    def _shortage(self, asked: _Demand, num_before: float = 0.0) -> _Shortage | None:
        """Return why a request does not fit behind `num_before` expected sequences; None if the request fits."""
        terms = asked.terms
        bonus = _RETURN_BONUS if terms.is_retry else 0.0
        holding = self._holdings.get(terms.tenant, _Holding())
        num_sequences = asked.num_sequences + num_before
        excess = _excess(holding.num_sequences, self.num_sequences, num_sequences, self.max_num_sequences, bonus)
        excess_tokens = 0.0
        if self.num_waiting_tokens:
            tokens, limit = asked.num_tokens, self._max_waiting_tokens
            excess_tokens = _excess(holding.num_waiting_tokens, self.num_waiting_tokens, tokens, limit, bonus)
        if excess > 0 or excess_tokens > 0:
            return _Shortage(
                max(
                    self._finished.seconds_for(excess) if excess > 0 else 0.0,
                    self._started_tokens.seconds_for(excess_tokens) if excess_tokens > 0 else 0.0,
                )
            )
        if self.num_sequences + num_sequences <= self._max_num_running or not self._started.is_known:
            return None
        wait_seconds = self._wait_seconds(self._num_ahead(terms.tenant, num_sequences) + num_sequences)
        # The engine's queue serves tenants in turn, so the first waiting sequence of a tenant begins early. A tenant
        # with nothing waiting and less than an even share of the slots is therefore bounded by its timeout only.
        num_owners = len(self._holdings) + (terms.tenant not in self._holdings)
        is_served = holding.num_waiting or holding.num_sequences * num_owners >= self._max_num_running
        patience_seconds = terms.patience_seconds if is_served else terms.timeout_seconds
        patience_seconds *= 1.0 + bonus
        if wait_seconds <= patience_seconds:
            return None
        return _Shortage(wait_seconds - patience_seconds, wait_seconds)

    def _wait_seconds(self, num_starts: float) -> float:
        """Return the seconds until `num_starts` more sequences have begun, beyond a prompt's time on an idle queue."""
        num_seen = self._forecast.num_seen
        if not num_seen:
            return self._started.seconds_for(num_starts)
        # Number of the waiting sequences that have a slot already, or get a slot at the next step.
        num_placed = min(num_starts, max(0, self._max_num_running - self._num_running))
        # While more sequences run than the lowered limit allows, the first endings free no slot.
        num_endings = num_starts - num_placed + max(0, self._num_running - self._max_num_running)
        num_foreseen = min(num_endings, num_seen)
        seconds = self._forecast.seconds_until_ended(num_foreseen)
        seconds += self._started.seconds_for(num_endings - num_foreseen)
        # Where prefill is the bottleneck, sequences with a slot still wait for their first token.
        usual_seconds = self._forecast.seconds_for_tokens(_PROMPT_STEPS)
        return max(seconds, self._started.seconds_for(num_placed) - usual_seconds)

    def _num_ahead(self, tenant: str, num_sequences: float) -> float:
        """Return the number of waiting sequences that begin before the last of `num_sequences` new ones of a tenant.

        These are the tenant's own, and at most as many of each other tenant: the engine's queue serves tenants in turn.
        """
        own = self._holdings.get(tenant, _Holding()).num_waiting
        others = (min(o.num_waiting, own + num_sequences) for name, o in self._holdings.items() if name != tenant)
        return own + sum(others)

    def _watch(self) -> None:
        """Check the recorded Retry-After values against the room that there is now."""

        self._retry_tracker.watch(self._clock(), lambda asked, num_before: self._shortage(asked, num_before) is None)

    def _advance(self, *, sequences: int = 0, tokens: int = 0, begun: int = 0) -> None:
        now = self._clock()
        seconds = now - self._last_seconds if self.num_sequences else 0.0
        self._last_seconds = now
        self._forecast.pass_time(seconds)
        self._finished.add(sequences, seconds)
        self._started_tokens.add(tokens, seconds)
        # The threshold is below 1 so that a slot which is free for a moment does not interrupt the measurement.
        if self.num_sequences >= _FULL * self._max_num_running:
            self._started.add(begun, seconds)


def _excess(held: float, total: float, asked: float, limit: float, bonus: float) -> float:
    """Return how much must be freed before a tenant that holds `held` of `total` may have `asked` more.

    A tenant may hold `_THRESHOLD` times what is left of a capacity of `limit * (1 + 1 / _THRESHOLD)`, so that a single
    tenant may hold `limit`. What is freed is assumed to be the tenant's own, so it lowers both `held` and `total`.
    """
    room = math.floor(limit * (1.0 + bonus)) * (_THRESHOLD + 1)
    return (held + asked + _THRESHOLD * (total + asked) - room) / (_THRESHOLD + 1)
