"""Symbolic formulas that carry their value, so the printed formula is the one evaluated. Torch-free."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Formula:
    """Sum or product of named whole numbers; the same operations build `text` and `value`.

    text: as an article writes it, "d·(2·d_k + d_v)".
    value: the formula's value.
    is_sum: the formula needs brackets as a factor.
    """

    text: str
    value: int
    is_sum: bool = False

    @classmethod
    def number(cls, value: int) -> Self:
        """Return a formula of a number, written as itself."""
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
