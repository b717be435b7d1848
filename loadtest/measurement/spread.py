"""Statistics of repeated measurements: median and range, ratios of pairs, and deviation within groups."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Return median, minimum, maximum and all values of a repeated measurement, JSON-ready."""
    kept = list(values)
    return {"median": statistics.median(kept), "min": min(kept), "max": max(kept), "values": kept}


def ratio_spread(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, Any]:
    """Return median, range and all ratios of value pairs. Both values of a pair were measured one after the other."""
    return spread(top / bottom for top, bottom in zip(numerators, denominators, strict=True))


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float:
    """Return the pooled standard deviation of values within groups. Raises ValueError if no group has two values."""
    freedom = sum(len(values) - 1 for values in groups)
    if freedom < 1:
        raise ValueError("the noise between seeds needs at least two seeds; run bench_attention train --seeds 1 2")
    return math.sqrt(sum((len(values) - 1) * statistics.variance(values) for values in groups) / freedom)
