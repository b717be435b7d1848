"""Closed formulas that know their value: what is printed is what was evaluated. Torch-free."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Formula:
    """Whole numbers under their letters, joined by + and ·: `text` and `value` are made by the same operations.

    text: as an article writes it, "d·(2·d_k + d_v)".
    value: the number it comes to.
    is_sum: whether a factor must put it in brackets.
    """

    text: str
    value: int
    is_sum: bool = False

    @classmethod
    def number(cls, value: int) -> Self:
        """A number under its own name."""
        return cls(str(value), value)

    def __add__(self, other: "Formula") -> "Formula":
        return Formula(f"{self.text} + {other.text}", self.value + other.value, is_sum=True)

    def __mul__(self, other: "Formula") -> "Formula":
        return Formula(f"{self._factor}·{other._factor}", self.value * other.value)

    def __rmul__(self, number: int) -> "Formula":
        return Formula.number(number) * self

    @property
    def _factor(self) -> str:
        return f"({self.text})" if self.is_sum else self.text
