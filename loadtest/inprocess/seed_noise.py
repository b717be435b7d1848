"""Random error of a difference between two mechanisms, from several seeds.

Two rows trained from one seed see the same texts in the same order, so their losses are compared seed by seed. The
variation of such differences between seeds is estimated from all rows together (pooled standard deviation), because
a few seeds of one row are too few.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Two standard errors: chance alone exceeds them in about one of twenty comparisons.
_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of a row's held-out loss from that of its compared row: nats per token, mean over seeds.

    error: two standard errors of the mean; None with a single seed.
    """

    mean: float
    error: float | None

    @property
    def verdict(self) -> str:
        """Verdict in words: a difference counts only if it is larger than its error."""
        if self.error is None:
            return "one seed: not known"
        if abs(self.mean) <= self.error:
            return "within the noise"
        return "better" if self.mean < 0 else "worse"


def losses(row: Mapping[str, Any]) -> dict[int, float]:
    """Return the held-out nats per token of each seed."""
    return {run["seed"]: run["nats_per_token"] for run in row["runs"]}


def mean_loss(row: Mapping[str, Any]) -> float:
    """Return the mean held-out loss over seeds."""
    return statistics.fmean(losses(row).values())


def differences(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Difference]:
    """Return each row's difference from its compared row. A row compared with itself is left out."""
    by_seed = {
        name: _by_seed(losses(row), losses(rows[row["compared_with"]]))
        for name, row in rows.items()
        if row["compared_with"] != name
    }
    deviation = _pooled_deviation(list(by_seed.values()))
    return {
        name: Difference(
            statistics.fmean(values), None if deviation is None else _ERRORS * deviation / math.sqrt(len(values))
        )
        for name, values in by_seed.items()
    }


def seed_spread(rows: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the pooled standard deviation of a row's loss between seeds; None for a single seed."""
    return _pooled_deviation([list(losses(row).values()) for row in rows.values()])


def _by_seed(own: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    return [own[seed] - other[seed] for seed in own if seed in other]


def _pooled_deviation(groups: list[list[float]]) -> float | None:
    """Return the root of the mean within-group variance, weighted by degrees of freedom."""
    freedom = sum(len(values) - 1 for values in groups)
    if freedom < 1:
        return None
    squares = sum((value - statistics.fmean(values)) ** 2 for values in groups for value in values)
    return math.sqrt(squares / freedom)
