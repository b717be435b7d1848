"""Figures of repeated measurements: median and range, ratios of pairs, percentiles, and Markdown tables."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Return median, minimum, maximum and all values of a repeated measurement, JSON-ready."""
    kept = list(values)
    return {"median": statistics.median(kept), "min": min(kept), "max": max(kept), "values": kept}


def ratio_spread(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, Any]:
    """Return median, range and all ratios of value pairs. Both values of a pair were measured one after the other."""
    return spread(top / bottom for top, bottom in zip(numerators, denominators, strict=True))


def percentiles(values: Sequence[float], shares: Sequence[float]) -> dict[str, float | None]:
    """Return percentiles by name, such as p99; None without values."""
    found = np.percentile(values, shares).tolist() if len(values) else [None] * len(shares)
    return {f"p{share:g}": value for share, value in zip(shares, found, strict=True)}


def number(value: float | None) -> str:
    """Return a figure with three digits, at most four of them decimals; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{round(value, 4):.3g}"


class Column(NamedTuple):
    """Description of one column of a Markdown table whose rows are JSON objects.

    head: heading. key: dotted path of the value in a row, for example "step_ms.median".
    form: format specification of numbers. scale: factor for numbers. unit: text after the value.
    """

    head: str
    key: str
    form: str = ""
    scale: float = 1.0
    unit: str = ""


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted path in a JSON object. A number in the path is an index of a list."""
    value: Any = row
    for name in key.split("."):
        value = value[int(name) if isinstance(value, list) else name]
    return value


def cell(row: Mapping[str, Any], column: Column) -> str:
    """Return a row's text for one column. Repeats become their median, with a range in brackets if any."""
    value = value_at(row, column.key)
    if isinstance(value, Mapping):
        low, median, high = (f"{column.scale * value[name]:{column.form}}" for name in ("min", "median", "max"))
        return (median if low == high else f"{median} ({low}–{high})") + column.unit
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value.replace("|", "\\|").replace("\n", " ")
    return f"{column.scale * value if column.scale != 1 else value:{column.form}}{column.unit}"


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return JSON rows as a Markdown table, which ends in a line break."""
    lines = [[column.head for column in columns], ["---"] * len(columns)]
    lines += [[cell(row, column) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
