"""Median and spread of a figure that was measured several times."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of a repeated measurement, in the order they were taken.

    Raises:
        ValueError: there is no value.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a spread needs at least one value")

    @classmethod
    def of_ratios(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Self:
        """Return ratios pair by pair. Both values of a pair met the same state of the machine, so drift cancels."""
        return cls(tuple(top / bottom for top, bottom in zip(numerators, denominators, strict=True)))

    @property
    def median(self) -> float:
        """Median of the values."""
        return statistics.median(self.values)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary: median, minimum, maximum and every value."""
        return {
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "values": list(self.values),
        }


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Return the spread of the values as a dictionary."""
    return Spread(tuple(values)).to_dict()


def ratio_spread(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, Any]:
    """Return the spread of the ratios within pairs as a dictionary."""
    return Spread.of_ratios(numerators, denominators).to_dict()
