"""Measurement of one request rate: windows of an open loop, warm-up, steady state or overload.

Every window has the same number of requests, at uniformly random times. That is a Poisson process whose number of
arrivals is given, so that windows differ less than with free arrivals, and a growing queue shows sooner.
"""

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from loadtest.client.outcome import Ending, LoadRun, Outcome
from loadtest.client.report import Slo

# Overload: each window adds more requests in flight, or loses more, than this share of its requests.
_GROWTH, _LOST_SHARE = 0.01, 0.01
_RULED_OUT = 0.03  # stable: growth by more than this share is ruled out
_DEVIATIONS = 3.0  # growth that chance may show, in standard deviations of a Poisson number of requests in flight
_DECISION = 0.99  # one-sided confidence of both
_LOST = (Ending.SHED, Ending.TIMEOUT, Ending.CONNECTION, Ending.HTTP_ERROR, Ending.STREAM_ERROR)


class State(StrEnum):
    """Verdict on a request rate."""

    STABLE = "stable"
    OVERLOADED = "overloaded"  # requests in flight grow, or are rejected or lost
    REPLAYED = "replayed"  # a trace, whose rate is what it is
    UNCLEAR = "unclear"  # neither is certain: close to the capacity, or an unsteady server


class LoadWindow(NamedTuple):
    """End of one window of an open loop, and all requests of the loop so far; `end_seconds` is 0 while in flight."""

    ended_seconds: float
    outcomes: Sequence[Outcome]


class Load(Protocol):
    """Open loop on a server, real or simulated."""

    def windows(self, count: int, seconds: float) -> Generator[LoadWindow]:
        """Send `count` requests in each window of this length, without end. `close` disconnects those in flight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPlan:
    """Length and number of the windows at one rate.

    seconds: length of a window, apart from rounding its number of requests.
    num_windows: windows to count after the warm-up, at least. Three times as many are measured at most.
    """

    seconds: float
    num_windows: int = 8

    @property
    def max_windows(self) -> int:
        """Number of windows after which the verdict is given in any case."""
        return 3 * self.num_windows

    def size(self, rate: float) -> tuple[int, float]:
        """Return the number of requests in a window, and its exact length in seconds, for a request rate."""
        count = max(1, round(rate * self.seconds))
        return count, count / rate


@dataclass(kw_only=True, slots=True)
class Level:
    """Measured load at one rate.

    warm_up: number of windows that do not count. ends: time at the end of each window.
    growth: number of requests in flight that a window added, as a share of its requests.
    served: requests served per second of each window after the warm-up.
    server_ms: mean time of a request in each phase, from the server's metrics.
    """

    rate: float
    state: State
    warm_up: int
    ends: list[float]
    window_seconds: float
    growth: float
    outcomes: list[Outcome] = field(default_factory=list)
    served: list[float] = field(default_factory=list)
    slo_breaches: list[str] = field(default_factory=list)
    client_cpu_share: float = 0.0
    server_ms: dict[str, float | None] = field(default_factory=dict)

    def run(self, number: int | None = None) -> LoadRun:
        """Return the load of all windows after the warm-up, or that of window `number` after the warm-up."""
        first, last = (self.warm_up, len(self.ends) - 1) if number is None else [self.warm_up + number] * 2
        return LoadRun(
            outcomes=self.outcomes,
            began_seconds=self.ends[first] - self.window_seconds,
            ended_seconds=self.ends[last],
            client_cpu_share=self.client_cpu_share,
        )

    def is_open(self, window: LoadWindow) -> bool:
        """Return True if a request that counts has not ended by the end of this window.

        In a stable load, all requests after the warm-up count, otherwise those with tokens.
        """
        began, ended = self.ends[self.warm_up] - self.window_seconds, self.ends[-1]
        return any(
            not 0.0 < outcome.end_seconds <= window.ended_seconds
            and (
                began <= outcome.intended_seconds <= ended
                if self.state is State.STABLE
                else (outcome.chunk_seconds[:1] or [ended])[0] < ended
            )
            for outcome in window.outcomes
        )

    def windows(self) -> list[LoadRun]:
        """Return the load of each window after the warm-up."""
        return [self.run(number) for number in range(len(self.ends) - self.warm_up)]


def measure(
    load: Load, rate: float, plan: WindowPlan, slo: Slo, on_window: Callable[[int], None] = lambda number: None
) -> Level:
    """Send requests at one rate until it is known to be stable or overloaded, and return the measured level.

    The load goes on until the counted requests have ended, for as many more windows as the plan counts at most. An
    overloaded server need not end those that have no token yet.
    on_window: called after each window with the number of windows so far.
    """
    count, seconds = plan.size(rate)
    began, ends, level = (time.perf_counter(), time.process_time()), list[float](), None
    with closing(load.windows(count, seconds)) as windows:
        for number, window in enumerate(windows, 1):
            on_window(number)
            if level is None:
                ends.append(window.ended_seconds)
                level = judge(window.outcomes, ends, rate, plan)
            if level is not None and not (number < len(ends) + plan.num_windows and level.is_open(window)):
                break
    assert level is not None
    level.outcomes = [each for each in window.outcomes if 0.0 < each.end_seconds <= window.ended_seconds]
    level.client_cpu_share = (time.process_time() - began[1]) / max(time.perf_counter() - began[0], 1e-9)
    level.served = [window.served_per_second for window in level.windows()]
    level.slo_breaches = slo.breaches(level.run().sent, level.run().tokens_per_second)
    return level


def judge(outcomes: Sequence[Outcome], ends: Sequence[float], rate: float, plan: WindowPlan) -> Level | None:
    """Return the level if these windows settle the state of a rate or are the most to measure; otherwise None.

    The requests in flight at the ends of the windows are fitted by a line after the warm-up. While more and more
    requests end in each window, the warm-up is not over, and growth is no overload.
    """
    count, seconds = plan.size(rate)
    is_last = len(ends) >= plan.max_windows
    intended = np.sort([outcome.intended_seconds for outcome in outcomes])
    ended = np.sort([outcome.end_seconds for outcome in outcomes if outcome.end_seconds > 0.0])
    num_ended = np.searchsorted(ended, ends, side="right")
    # At the beginning of the first window, and at the end of each window.
    in_flight = np.append(0, np.searchsorted(intended, ends, side="right") - num_ended)
    warm_up = warm_up_length(in_flight)
    if len(ends) - warm_up < plan.num_windows and not is_last:
        return None
    slope, margin = _slope(in_flight[warm_up:])
    rise, rise_margin = _slope(np.diff(num_ended, prepend=0)[warm_up:])
    began = ends[warm_up] - seconds
    counted = [o for o in outcomes if began <= o.intended_seconds and 0.0 < o.end_seconds <= ends[-1]]
    num_lost = sum(outcome.ending in _LOST for outcome in counted)
    interval = stats.binomtest(num_lost, len(counted)).proportion_ci(2 * _DECISION - 1) if counted else None
    # Of requests in flight, over all windows: what chance alone may add to a steady load.
    noise = _DEVIATIONS * math.sqrt(max(1.0, float(np.mean(in_flight[warm_up:])))) / (len(ends) - warm_up)
    is_growing = slope > max(margin, noise, _GROWTH * count)
    if (is_growing and (rise <= rise_margin or is_last)) or (interval is not None and interval.low > _LOST_SHARE):
        state = State.OVERLOADED
    elif slope + margin <= max(noise, _RULED_OUT * count):
        state = State.STABLE
    elif is_last:
        state = State.UNCLEAR
    else:
        return None
    return Level(rate=rate, state=state, warm_up=warm_up, ends=list(ends), window_seconds=seconds, growth=slope / count)


def warm_up_length(values: NDArray[Any]) -> int:
    """Return the number of first values to leave out so that the mean of the rest has the smallest standard error.

    At most half of the values are left out. This is the rule MSER of K. P. White, Simulation 69(6), 1997.
    """
    starts = range(len(values) // 2 + 1)
    return min(starts, key=lambda start: np.var(values[start:]) / (len(values) - start))


def _slope(values: NDArray[Any]) -> tuple[float, float]:
    """Return the slope of a line through values, and the half-width of its one-sided confidence interval."""
    fit = stats.linregress(np.arange(len(values)), values)
    error = 0.0 if math.isnan(fit.stderr) else fit.stderr  # nan for equal values
    return float(fit.slope), float(error * stats.t.ppf(_DECISION, len(values) - 2))
