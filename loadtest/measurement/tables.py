"""Markdown tables of JSON results. Columns are data: heading, key of the value, format."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Column(NamedTuple):
    """One column of a table.

    key: dotted path of the value in a row, for example "step_ms.median".
    form: format specification of numbers. scale: factor for numbers. unit: text after the value.
    """

    head: str
    key: str
    form: str = ""
    scale: float = 1.0
    unit: str = ""


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted path of a row. A number in the path is an index of a list."""
    value: Any = row
    for name in key.split("."):
        value = value[int(name) if isinstance(value, list) else name]
    return value


def cell(row: Mapping[str, Any], column: Column) -> str:
    """Return the text of one table cell. A spread becomes its median, with minimum and maximum in brackets."""
    value = value_at(row, column.key)
    if isinstance(value, Mapping):
        low, median, high = (f"{column.scale * value[name]:{column.form}}" for name in ("min", "median", "max"))
        return f"{median} ({low}–{high}){column.unit}"
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value.replace("|", "\\|").replace("\n", " ")
    return f"{column.scale * value if column.scale != 1 else value:{column.form}}{column.unit}"


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a Markdown table that ends in a line break."""
    return text_table([column.head for column in columns], ([cell(row, c) for c in columns] for row in rows))


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of finished cells that ends in a line break."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
