"""What an arrival does to those who stream: arithmetic on the times of their tokens. Seconds of one clock."""

import math
from collections.abc import Sequence
from itertools import pairwise


def steps_between(streams: Sequence[Sequence[float]], start: float, end: float) -> int:
    """Steps of the engine from `start` (not included) to `end`: tokens of the stream that got most of them."""
    return max(sum(start < at <= end for at in seconds) for seconds in streams)


def gaps_within(streams: Sequence[Sequence[float]], start: float, end: float) -> list[float]:
    """Gaps between a stream's tokens, of all streams: those that end after `start` and begin before `end`."""
    pairs = (pair for seconds in streams for pair in pairwise(seconds))
    return [later - earlier for earlier, later in pairs if later > start and earlier < end]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed (the nearest rank; none is made up between two).

    Raises:
        ValueError: there are none, or the share is not over 0 and at most 1.
    """
    if not values or not 0 < share <= 1:
        raise ValueError("a percentile needs values, and a share over 0 and at most 1")
    return sorted(values)[math.ceil(share * len(values)) - 1]
