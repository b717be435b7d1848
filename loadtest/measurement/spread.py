"""Median and spread of a figure that was measured several times."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of a repeated measurement, at least one, in the order of measuring."""

    values: tuple[float, ...]

    @classmethod
    def of_ratios(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Self:
        """Return ratios pair by pair. Drift of the machine affects both values of a pair alike, so it cancels."""
        return cls(tuple(top / bottom for top, bottom in zip(numerators, denominators, strict=True)))

    @property
    def median(self) -> float:
        """Median of the values."""
        return statistics.median(self.values)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary: median, minimum, maximum and every value."""
        values = list(self.values)
        return {"median": self.median, "min": min(values), "max": max(values), "values": values}


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Return the spread of the values as a dictionary."""
    return Spread(tuple(values)).to_dict()


def ratio_spread(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, Any]:
    """Return the spread of the ratios within pairs as a dictionary."""
    return Spread.of_ratios(numerators, denominators).to_dict()
