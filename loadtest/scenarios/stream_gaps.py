"""Steps and token gaps of streams between two times. All times are seconds of one clock."""

import math
from collections.abc import Sequence
from itertools import pairwise


def steps_between(streams: Sequence[Sequence[float]], start: float, end: float) -> int:
    """Return the engine steps from `start` (excluded) to `end`: the tokens of the stream that got most."""
    return max(sum(start < at <= end for at in seconds) for seconds in streams)


def gaps_within(streams: Sequence[Sequence[float]], start: float, end: float) -> list[float]:
    """Return the token gaps of all streams that end after `start` and begin before `end`."""
    pairs = (pair for seconds in streams for pair in pairwise(seconds))
    return [later - earlier for earlier, later in pairs if later > start and earlier < end]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of the values do not exceed (nearest rank, no interpolation).

    Raises:
        ValueError: there are no values, or the share is not above 0 and at most 1.
    """
    if not values or not 0 < share <= 1:
        raise ValueError("a percentile needs values, and a share above 0 and at most 1")
    return sorted(values)[math.ceil(share * len(values)) - 1]
