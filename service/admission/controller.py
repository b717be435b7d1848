"""Admission control: admit a request into the queue, or reject the request with a Retry-After.

Three limits apply: the number of admitted sequences, the tokens of waiting sequences, and the predicted wait until the
engine starts the request. This wait is the number of sequences ahead in the queue, divided by the rate at which
sequences recently ended while the server was full. Until every slot has had an ending, the rate of starts is used. The
rejected clients of a tenant form a virtual queue: each gets a later Retry-After than the clients rejected before.
"""

import functools
import ipaddress
import math
import random
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from service.config.settings import ServeSettings
from service.http.middleware import KEY_NAME
from service.http.request_io import TIMEOUT_HEADER
from service.protocol.errors import InvalidRequest, Overloaded, WaitTooLong

_MAX_RETRY_AFTER_SECONDS = 120.0  # the OpenAI SDKs ignore a longer Retry-After
_MIN_RETRY_AFTER_SECONDS = 0.02  # a new connection and a request take some milliseconds by themselves
_THRESHOLD = 4  # largest holding of a tenant, as a multiple of the capacity that is left
# Load (admitted sequences per slot) from which endings count toward the rate of a full server. The load is below 1 so
# that a slot which is free for a moment does not interrupt the measurement.
_FULL = 7 / 8
_SPREAD = 0.25  # maximum random lengthening of Retry-After, as a fraction; it spreads retries
_RETRY_BONUS = 0.25  # extra capacity and extra accepted wait of a retry, as a fraction
_RATE_SECONDS = 30.0  # time constant of the rates: long enough to average over a batch, short enough to follow the load
_UNKNOWN_WAIT_SECONDS = 1.0  # predicted wait while a rate is unknown
_MIN_EVENTS = 16  # in a known rate: the mean of 16 exponential gaps has a standard error of a quarter
_NUM_AVERAGED_REJECTIONS = 100  # over which the share of clients that retry is averaged
_MAX_CHECKED = 16  # sample of Retry-After values whose error is measured
_MAX_RETRY_QUEUES = 1000  # above this number of virtual queues, queues with no expected retry are dropped
# Seconds after which a client of OpenAI's SDKs no longer reads, in Python and in Node.js.
_SDK_TIMEOUTS = ("x-stainless-read-timeout", "x-stainless-timeout")
_RETRY_COUNT = "x-stainless-retry-count"  # header of OpenAI's SDKs: number of earlier attempts at this request
_IPV6_SITE = 64  # prefix length of one tenant, since a site has all addresses of its network (RFC 6177)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuePolicy:
    """Queueing terms of one request: its tenant, its timeout, and the longest predicted wait that it accepts."""

    tenant: str = ""  # API key or address of the client; slots and queue room are shared fairly among tenants
    cache_namespace: str = ""  # requests of different namespaces share no cached prefixes
    timeout_seconds: float = math.inf  # time in the queue after which the request is ended
    max_predicted_wait_seconds: float = math.inf  # predicted wait above which the request is rejected
    is_retry: bool = False  # the SDK reports an earlier attempt at this request

    def deadline(self, arrival_seconds: float) -> float | None:
        """Return the time at which a request that arrived at `arrival_seconds` times out in the queue; None: never."""
        return arrival_seconds + self.timeout_seconds if math.isfinite(self.timeout_seconds) else None


class Rate:
    """Exponentially weighted average of a rate, such as tokens per second, over the time intervals given to `add`.

    min_events: number of events after which the rate is known.
    amount: initial amount, as if it had come just before the first interval.
    """

    def __init__(self, *, min_events: int = _MIN_EVENTS, amount: float = 0.0) -> None:
        self._min_events = min_events
        self._amount, self._seconds = amount, 0.0
        self._num_events = 0

    def add(self, amount: float, seconds: float) -> None:
        """Add an interval that ends now: `amount`, spread evenly over the last `seconds`."""
        keep = math.exp(-seconds / _RATE_SECONDS)
        weighted_seconds = _RATE_SECONDS * (1.0 - keep)  # of this interval, as seen from its end
        self._amount = self._amount * keep + amount * (weighted_seconds / seconds if seconds > 0.0 else 1.0)
        self._seconds = self._seconds * keep + weighted_seconds
        self._num_events += amount > 0.0

    def doubt(self) -> None:
        """Keep the rate, with the weight of one event. It counts as unknown until enough further events."""
        if self._amount > 0.0:
            self._amount, self._seconds = 1.0, self._seconds / self._amount
        self._num_events = 0

    @property
    def is_known(self) -> bool:
        """True if enough events were added for a wait predicted from the rate to justify a rejection."""
        return self._num_events >= self._min_events and self._amount > 0.0 and self._seconds > 0.0

    def seconds_for(self, amount: float) -> float:
        """Return the seconds that `amount` takes at this rate; 1 s before the first event."""
        if self._amount <= 0.0 or self._seconds <= 0.0:
            return _UNKNOWN_WAIT_SECONDS
        return amount * self._seconds / self._amount


@dataclass(slots=True)
class _Holding:
    """Counts of one tenant's sequences that were admitted and have not ended."""

    num_sequences: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0


@dataclass(slots=True)
class _RetryQueue:
    """Virtual queue of a tenant's rejected clients: times of due retries, decaying counts of rejections and retries."""

    due_seconds: list[float] = field(default_factory=list)  # one entry per rejected sequence, ascending
    num_rejected: float = 2.0  # prior: half of the rejected clients retry
    num_retried: float = 1.0

    def num_expected(self, now: float, before: float) -> float:
        """Drop retries that were due before `now`. Return the expected number of retries until `before`."""
        del self.due_seconds[: bisect_left(self.due_seconds, now)]
        return min(1.0, self.num_retried / self.num_rejected) * bisect_left(self.due_seconds, before)


@dataclass(frozen=True, slots=True)
class _Demand:
    """Capacity that a request needs: its number of sequences, and the tokens of all of them (prompt and max_tokens)."""

    num_sequences: int
    num_tokens: int
    terms: QueuePolicy


@dataclass(frozen=True, slots=True)
class _Shortage:
    """Reason why a request cannot be admitted.

    seconds: predicted time until the request would be admitted.
    wait_seconds: predicted wait of the request in the queue, if that is too long; None: the server is full.
    """

    seconds: float
    wait_seconds: float | None = None


class Admission:
    """Admission control by the number of sequences that were admitted and have not ended.

    A sequence is waiting until its first tokens arrive from the engine. Its token count is the prompt plus max_tokens.

    max_num_running: limit of running sequences of each worker.

    observe_error: gets the error of a sampled Retry-After, in seconds: the time at which the rejected request would
        have been admitted, minus the time at which its Retry-After ends.
    """

    def __init__(
        self,
        *,
        max_num_running: int,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        num_workers: int = 1,
        observe_error: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,  # spreads the Retry-After values
    ) -> None:
        self._configured_max_num_running = max_num_running
        self._limits = [max_num_running] * num_workers
        self._max_num_running = max_num_running = max_num_running * num_workers
        self.max_num_sequences = max_num_running + max_waiting_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._observe_error = observe_error
        self._clock = clock
        self._random = draw
        self._last_seconds = clock()
        # Sequence endings, while the server is about full. A burst that fills the slots has no ending for the time of a
        # completion, which makes the mean rate too low until each slot has had an ending.
        self._ended = Rate(min_events=max(_MIN_EVENTS, max_num_running))
        # Sequence starts, while the server is about full: known before the first endings. The starts that filled the
        # slots count, too.
        self._started = self._new_rate_of_starts()
        self._started_tokens = Rate()  # tokens of sequences that start, while sequences wait
        self._holdings: dict[str, _Holding] = {}
        self._retry_queues: dict[str, _RetryQueue] = {}
        self._checked: deque[tuple[_Demand, float]] = deque()  # with the time at which the Retry-After ends
        self.num_sequences = 0
        self.num_waiting_tokens = 0

    def admit(self, token_counts: list[int], terms: QueuePolicy | None = None) -> None:
        """Admit all sequences of a request, or raise Overloaded with a Retry-After. An idle server admits any request.

        token_counts: for each sequence, the tokens of its prompt plus max_tokens.
        """
        demand = _Demand(len(token_counts), sum(token_counts), QueuePolicy() if terms is None else terms)
        self._advance()
        self._count_retry(demand.terms)
        if (shortage := self._shortage(demand)) is not None:
            raise self._rejection(demand, shortage)
        holding = self._holdings.setdefault(demand.terms.tenant, _Holding())
        holding.num_sequences += demand.num_sequences
        holding.num_waiting += demand.num_sequences
        holding.num_waiting_tokens += demand.num_tokens
        self.num_sequences += demand.num_sequences
        self.num_waiting_tokens += demand.num_tokens

    def reject_by_headers(self, terms: QueuePolicy) -> None:
        """Raise Overloaded, as `admit` does, if `admit` would reject even a request for one token with these terms."""
        demand = _Demand(1, 1, terms)
        self._advance()
        if (shortage := self._shortage(demand)) is not None:
            self._count_retry(terms)
            raise self._rejection(demand, shortage)

    def started(self, num_tokens: int, tenant: str = "") -> None:
        """Record that a waiting sequence, admitted with `num_tokens` tokens, has started in the engine."""
        self._advance(num_started=1, num_started_tokens=num_tokens)
        holding = self._holdings[tenant]
        holding.num_waiting -= 1
        holding.num_waiting_tokens -= num_tokens
        self.num_waiting_tokens -= num_tokens
        self._check_retry_after()

    def ended(self, tenant: str = "") -> None:
        """Record an admitted sequence's end, for any reason. Call `started` first, even if the sequence never ran."""
        self._advance(num_ended=1)
        holding = self._holdings[tenant]
        holding.num_sequences -= 1
        if not holding.num_sequences:
            del self._holdings[tenant]
        self.num_sequences -= 1
        self._check_retry_after()
        if not self.num_sequences:  # the next requests may be shorter
            self._ended.doubt()
            self._started = self._new_rate_of_starts()

    def _new_rate_of_starts(self) -> Rate:
        return Rate(amount=_FULL * self._configured_max_num_running * len(self._limits))

    def limit_running(self, max_num_running: int | None, worker: int = 0) -> None:
        """Set a worker's current limit on running sequences, at most --max-num-running; None: --max-num-running."""
        configured = self._configured_max_num_running
        self._limits[worker] = configured if max_num_running is None else min(max_num_running, configured)
        self._max_num_running = sum(self._limits)

    def retry_after(self, token_counts: list[int], terms: QueuePolicy) -> float:
        """Record that an admitted request timed out in the queue, and return its Retry-After in seconds."""
        demand = _Demand(len(token_counts), sum(token_counts), terms)
        shortage = self._shortage(demand)
        return self._retry_after(demand, 0.0 if shortage is None else shortage.seconds)

    def _retry_after(self, demand: _Demand, seconds: float) -> float:
        """Record the rejection of a request, and return its Retry-After in seconds.

        seconds: predicted time until the request would be admitted if no other client retried. Expected retries of the
            same tenant are served first, which lengthens the Retry-After.
        """
        now = self._clock()
        queue = self._retry_queues.setdefault(demand.terms.tenant, _RetryQueue())
        if num_expected := queue.num_expected(now, math.inf):
            seconds += self._ended.seconds_for(num_expected)
        seconds *= 1.0 + _SPREAD * self._random()
        seconds = min(max(seconds, _MIN_RETRY_AFTER_SECONDS), _MAX_RETRY_AFTER_SECONDS)
        keep = 1.0 - 1.0 / _NUM_AVERAGED_REJECTIONS
        queue.num_rejected, queue.num_retried = queue.num_rejected * keep + 1.0, queue.num_retried * keep
        for _ in range(demand.num_sequences):
            insort(queue.due_seconds, now + seconds)
        if len(self._checked) < _MAX_CHECKED:
            self._checked.append((demand, now + seconds))
        if len(self._retry_queues) > _MAX_RETRY_QUEUES:
            self._retry_queues = {
                name: queue
                for name, queue in self._retry_queues.items()
                if queue.due_seconds and queue.due_seconds[-1] >= now
            }
        return seconds

    def _count_retry(self, terms: QueuePolicy) -> None:
        if terms.is_retry and (queue := self._retry_queues.get(terms.tenant)) is not None:
            queue.num_retried += 1.0

    def _check_retry_after(self) -> None:
        """Report the error of each sampled Retry-After whose request would fit now, or that ended 2 minutes ago."""
        now = self._clock()
        for _ in range(len(self._checked)):
            demand, due_seconds = self._checked.popleft()
            queue = self._retry_queues.get(demand.terms.tenant)
            num_before = 0.0 if queue is None else queue.num_expected(now, due_seconds)
            if self._shortage(demand, num_before) is None or now - due_seconds >= _MAX_RETRY_AFTER_SECONDS:
                self._observe_error(now - due_seconds)
            else:
                self._checked.append((demand, due_seconds))

    def _rejection(self, demand: _Demand, shortage: _Shortage) -> Overloaded:
        """Return the error, with a Retry-After, for a request that cannot be admitted because of `shortage`."""
        seconds = self._retry_after(demand, shortage.seconds)
        if shortage.wait_seconds is not None:
            return WaitTooLong(
                f"the request would wait about {shortage.wait_seconds:.1f} s, longer than "
                f"{demand.terms.max_predicted_wait_seconds:g} s; try again later, or set a larger timeout",
                retry_after_seconds=seconds,
            )
        return Overloaded(
            f"the server is full: {self.num_sequences} completions are running or waiting; try again later",
            retry_after_seconds=seconds,
        )

    def _shortage(self, demand: _Demand, num_before: float = 0.0) -> _Shortage | None:
        """Return why a request cannot be admitted after `num_before` sequences of expected retries; None if it can."""
        terms = demand.terms
        bonus = _RETRY_BONUS if terms.is_retry else 0.0
        holding = self._holdings.get(terms.tenant, _Holding())
        num_sequences = demand.num_sequences + num_before
        excess = _excess(holding.num_sequences, self.num_sequences, num_sequences, self.max_num_sequences, bonus)
        excess_tokens = 0.0
        if self.num_waiting_tokens:
            tokens, limit = demand.num_tokens, self._max_waiting_tokens
            excess_tokens = _excess(holding.num_waiting_tokens, self.num_waiting_tokens, tokens, limit, bonus)
        if excess > 0 or excess_tokens > 0:
            seconds = self._ended.seconds_for(excess) if excess > 0 else 0.0
            token_seconds = self._started_tokens.seconds_for(excess_tokens) if excess_tokens > 0 else 0.0
            return _Shortage(max(seconds, token_seconds))
        rate = self._ended if self._ended.is_known else self._started
        if self.num_sequences + num_sequences <= self._max_num_running or not rate.is_known:
            return None
        # The engine's queue serves tenants in turn: ahead are a tenant's own sequences, and at most as many of each
        # other tenant.
        num_starts = holding.num_waiting + num_sequences
        num_starts += sum(
            min(other.num_waiting, num_starts) for tenant, other in self._holdings.items() if tenant != terms.tenant
        )
        wait_seconds = rate.seconds_for(num_starts)
        # The first waiting sequence of a tenant starts early. A tenant with nothing waiting and less than an even share
        # of the slots is therefore bounded by its timeout only.
        num_tenants = len(self._holdings) + (terms.tenant not in self._holdings)
        is_served = holding.num_waiting or holding.num_sequences * num_tenants >= self._max_num_running
        accepted_seconds = terms.max_predicted_wait_seconds if is_served else terms.timeout_seconds
        excess_seconds = wait_seconds - accepted_seconds * (1.0 + bonus)
        return _Shortage(excess_seconds, wait_seconds) if excess_seconds > 0 else None

    def _advance(self, *, num_ended: int = 0, num_started: int = 0, num_started_tokens: int = 0) -> None:
        """Update the rates with the interval since the last call, and the endings and starts at its end."""
        now = self._clock()
        seconds, self._last_seconds = now - self._last_seconds, now
        if self.num_sequences >= _FULL * self._max_num_running:
            self._ended.add(num_ended, seconds)
            self._started.add(num_started, seconds)
        if self.num_waiting_tokens:
            self._started_tokens.add(num_started_tokens, seconds)


def _excess(held: float, total: float, demanded: float, limit: float, bonus: float) -> float:
    """Return how many sequences or tokens a tenant must free before `demanded` more are admitted; 0 or less: none.

    held: the tenant's present number.
    total: the present number of all tenants together.

    Dynamic thresholds (Choudhury and Hahne 1998, IEEE/ACM Trans. Networking 6(2)): a tenant may hold `_THRESHOLD` times
    what is left of a capacity of `limit * (1 + 1 / _THRESHOLD)`. One tenant gets `limit`, two tenants get 5/9 of it
    each, and a third tenant still finds capacity. The freed amount lowers both `held` and `total`.
    """
    room = math.floor(limit * (1.0 + bonus)) * (_THRESHOLD + 1)
    return (held + demanded + _THRESHOLD * (total + demanded) - room) / (_THRESHOLD + 1)


def read_queue_policy(request: Request, timeout: float | None, settings: ServeSettings) -> QueuePolicy:
    """Return the queueing terms of a request, from its headers, the settings, and the `timeout` field of its body.

    The shortest of `timeout` (None: not set), the header `x-request-timeout`, the timeout header of OpenAI's SDKs and
    `--max-queue-seconds` applies. Raises InvalidRequest: `x-request-timeout` is not a number of seconds above 0.
    """
    header = request.headers.get(TIMEOUT_HEADER)
    header_seconds = math.inf if header is None else _seconds(header)
    if header_seconds is None:
        raise InvalidRequest(f"the header {TIMEOUT_HEADER} must be a number of seconds above 0", param=TIMEOUT_HEADER)
    sdk_limits = (_seconds(request.headers.get(name, "")) or math.inf for name in _SDK_TIMEOUTS)
    # A setting of 0 means no limit.
    limit = min(settings.max_queue_seconds or math.inf, timeout or math.inf, header_seconds, *sdk_limits)
    is_retry = request.headers.get(_RETRY_COUNT, "0").strip("0").isdecimal()
    # An explicit timeout is a willingness to wait that long. SDK default timeouts are not. But an SDK gives up after
    # two retries, so a retry is queued if there is room.
    accepts_wait = timeout is not None or header is not None or is_retry
    return QueuePolicy(
        tenant=tenant_of(request),
        cache_namespace="" if settings.share_prefix_cache else getattr(request.state, KEY_NAME, ""),
        timeout_seconds=limit,
        max_predicted_wait_seconds=limit if accepts_wait else min(settings.target_queue_seconds or math.inf, limit),
        is_retry=is_retry,
    )


def tenant_of(request: Request) -> str:
    """Return the tenant of a request: the name of its API key, or the client's address if there are no keys."""
    if (name := getattr(request.state, KEY_NAME, None)) is not None:
        return f"key {name}"
    return _tenant_at("" if request.client is None else request.client.host)


@functools.lru_cache(maxsize=4096)
def _tenant_at(host: str) -> str:
    try:
        return f"address {ipaddress.IPv6Network((host, _IPV6_SITE), strict=False)}"
    except ValueError:
        return f"address {host}"


def _seconds(text: str) -> float | None:
    """Parse a header value as a positive, finite number of seconds; return None for any other text."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None
