"""How much of a difference between two mechanisms is luck: seeds differ too.

Two rows trained from one seed see the same texts in the same order, so their losses are compared seed by seed. How
much such a difference varies between seeds is estimated from all rows together, since a few seeds of one row tell
little: the pooled standard deviation.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Twice the standard error: luck alone exceeds it about once in twenty comparisons.
_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Difference:
    """A row's held-out loss less that of the row it is compared with, nats a token, the mean over seeds.

    error: how far the mean may be off by luck; None where a single seed tells nothing of it.
    """

    mean: float
    error: float | None

    @property
    def verdict(self) -> str:
        """In words: a difference counts only where it is larger than its error."""
        if self.error is None:
            return "one seed: not known"
        if abs(self.mean) <= self.error:
            return "within the noise"
        return "better" if self.mean < 0 else "worse"


def losses(row: Mapping[str, Any]) -> dict[int, float]:
    """Held-out nats a token of each seed."""
    return {run["seed"]: run["nats_per_token"] for run in row["runs"]}


def mean_loss(row: Mapping[str, Any]) -> float:
    """The mean over seeds."""
    return statistics.fmean(losses(row).values())


def differences(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Difference]:
    """Each row against the one it is compared with; a row compared with itself is left out."""
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
    """Pooled standard deviation of one row's loss between seeds; None for a single seed."""
    return _pooled_deviation([list(losses(row).values()) for row in rows.values()])


def _by_seed(own: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    return [own[seed] - other[seed] for seed in own if seed in other]


def _pooled_deviation(groups: list[list[float]]) -> float | None:
    """Root of the mean within-group variance, weighted by degrees of freedom."""
    freedom = sum(len(values) - 1 for values in groups)
    if freedom < 1:
        return None
    squares = sum((value - statistics.fmean(values)) ** 2 for values in groups for value in values)
    return math.sqrt(squares / freedom)
