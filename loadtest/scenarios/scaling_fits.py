"""Fits of growth: y = c x^e by least squares of logarithms, y = a + b x by least squares of relative errors."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def power_law(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float]:
    """Return `exponent` e and `factor` c of y = c x^e, and `last`: the exponent between the two largest x.

    Raises:
        ValueError: fewer than two points, only one distinct x, or a value that is not positive.
    """
    log_x, log_y = np.log(_positive(xs)), np.log(_positive(ys))
    if len(log_x) != len(log_y) or len(np.unique(log_x)) < 2:
        raise ValueError("a fit needs at least two points with different x")
    exponent, constant = np.polyfit(log_x, log_y, 1)
    order = np.argsort(log_x)
    (x_1, x_2), (y_1, y_2) = log_x[order][-2:], log_y[order][-2:]
    last = (y_2 - y_1) / (x_2 - x_1) if x_2 > x_1 else math.nan
    return {"exponent": float(exponent), "factor": float(math.exp(constant)), "last": float(last)}


def line(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float]:
    """Return `fixed` a and `each` b of y = a + b x. Errors are relative to y, so that small points count as much.

    Raises:
        ValueError: as `power_law`.
    """
    x, y = _positive(xs), _positive(ys)
    if len(x) != len(y) or len(np.unique(x)) < 2:
        raise ValueError("a fit needs at least two points with different x")
    each, fixed = np.polyfit(x, y, 1, w=1 / y)
    return {"fixed": float(fixed), "each": float(each)}


def fits(xs: Sequence[float], ys: Sequence[float]) -> dict[str, Any]:
    """Return both fits, JSON-ready."""
    return {"power": power_law(xs, ys), "line": line(xs, ys)}


def _positive(values: Sequence[float]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    array = np.asarray(values, dtype=np.float64)
    if not (array > 0).all():
        raise ValueError("a fit needs positive values")
    return array
