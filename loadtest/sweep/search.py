"""Search for the limits of a server: which rate to measure next, and what the measured rates show.

All functions depend only on the levels measured so far, so an interrupted sweep has a result, too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from loadtest.sweep.level import Level, State

_NEAR = 1.6  # overloaded rates up to this multiple of the lowest one show the capacity
_CLEAR = 1.03  # well above what is served: by this factor
_MORE = 1.05  # more than this factor at a higher rate: the lower one met a disturbance, not the capacity
_BELOW = 0.99  # a stable rate is below the capacity, with its uncertainty, by this factor
_ABOVE, _ADDED = 1.1, (1.2, 1.3, 1.4, 1.5)  # multiples of the capacity to measure while its interval is wide
_LEAST_SHARE = 1 / 64  # of the first rate: lower rates are not tried


class Estimate(NamedTuple):
    """Mean of a figure over windows, and the bounds of its confidence interval."""

    mean: float
    low: float
    high: float


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Return the mean of a figure's values in independent windows, with its interval by Student's t."""
    mean, error = float(np.mean(values)), float(stats.sem(values)) if len(values) > 1 else math.inf
    margin = error * float(stats.t.ppf((1 + confidence) / 2, max(1, len(values) - 1)))
    return Estimate(mean, mean - margin, mean + margin)


def at_capacity(levels: Sequence[Level]) -> list[Level]:
    """Return the levels that show the capacity: overloaded, at rates up to 1.6 times the lowest overloaded rate.

    Of these, only levels with rates over 1.03 times the most that any of them served, if there are such levels.
    Below the capacity, a server with a short queue rejects bursts, and a slowly growing queue is empty at first.
    """
    overloaded = [level for level in levels if is_overloaded(level, levels)]
    near = [level for level in overloaded if level.rate <= _NEAR * min(each.rate for each in overloaded)]
    best = max((float(np.mean(level.served)) for level in near), default=0.0)
    return [level for level in near if level.rate > _CLEAR * best] or near


def capacity(levels: Sequence[Level], confidence: float = 0.95) -> Estimate | None:
    """Return the mean requests per second served at the levels of `at_capacity`; None if no level is overloaded."""
    values = [value for level in at_capacity(levels) for value in level.served]
    return estimate(values, confidence) if values else None


def is_overloaded(level: Level, levels: Sequence[Level]) -> bool:
    """Return True if a level is overloaded, unless the server clearly served more at a higher rate."""
    most = _MORE * estimate(level.served).high
    higher = (other for other in levels if other.rate > level.rate)
    return level.state is State.OVERLOADED and not any(estimate(other.served).low > most for other in higher)


def settled(levels: Sequence[Level]) -> dict[float, State]:
    """Return the state of each rate in view of all levels, ordered by rate.

    A rate close to the capacity, or above it, is not stable: its queue may only grow slowly.
    """
    served, states = capacity(levels, 0.99), dict[float, State]()
    certain = max((estimate(level.served, 0.99).low for level in levels), default=0.0)  # the server did serve this
    for level in sorted(levels, key=lambda level: level.rate):
        is_above = served is not None and level.rate >= _BELOW * max(served.low, certain)
        is_certain = is_overloaded(level, levels) or (level.state is State.STABLE and not is_above)
        states[level.rate] = level.state if is_certain else State.UNCLEAR
    return states


def bracket(verdicts: Mapping[float, bool | None]) -> tuple[float, float]:
    """Return the highest good rate below all bad rates (0 without one), and the next higher measured rate.

    The latter is bad or unclear, or infinity if no rate is higher.
    verdicts: by rate, True: good, False: bad, None: unclear.
    """
    bad = min((rate for rate, verdict in verdicts.items() if verdict is False), default=math.inf)
    good = max((rate for rate, verdict in verdicts.items() if verdict and rate < bad), default=0.0)
    return good, min((rate for rate in verdicts if rate > good), default=math.inf)


def brackets(levels: Sequence[Level]) -> list[tuple[float, float]]:
    """Return the bracket of the highest stable rate, and that of the highest stable rate that meets the objectives."""
    states = settled(levels)
    known = {State.STABLE: True, State.OVERLOADED: False, State.UNCLEAR: None}
    stable = {rate: known[state] for rate, state in states.items()}
    met = {level.rate: not level.slo_breaches for level in levels}
    return [bracket(stable), bracket({rate: verdict and met[rate] for rate, verdict in stable.items()})]


def next_rate(levels: Sequence[Level], *, first: float, precision: float) -> float | None:
    """Return the rate to measure next; None at the end.

    The rate doubles until it is too high, or halves until it is stable. Rates above the capacity are added until its
    interval is narrow. Then the geometric mean of both limits is measured, until they differ by less than `precision`;
    first for stable rates, then for those that meet the objectives.
    """
    if not levels:
        return first
    if (served := capacity(levels)) is None:
        return 2 * max(level.rate for level in levels)
    num_above = sum(level.rate > _ABOVE * served.mean for level in levels)
    if served.high - served.mean > precision / 2 * served.mean and num_above < len(_ADDED):
        return served.mean * _ADDED[num_above]
    for low, high in brackets(levels):
        if low == 0.0 and high > first * _LEAST_SHARE:
            return high / 2
        if low > 0.0 and high / low > 1 + precision:
            return math.sqrt(low * high)
    return None


def levels_left(levels: Sequence[Level], precision: float) -> int:
    """Return the number of levels that are probably still to be measured, if the next doubling finds the limit."""
    pairs = brackets(levels) if levels else [(1.0, math.inf)]
    ratios = [2.0 if low == 0.0 or high == math.inf else high / low for low, high in dict.fromkeys(pairs)]
    steps = [max(0, math.ceil(math.log2(math.log(ratio) / math.log(1 + precision)))) for ratio in ratios]
    return sum(steps) + sum(high == math.inf or low == 0.0 for low, high in pairs)
