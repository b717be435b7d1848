"""Markdown tables of JSON results, by a description of each column: heading, path of the value, format."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


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
    """Return a row's text for one column. Repeated measurements become their median, with the range in brackets."""
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
    """Return JSON rows as a Markdown table, which ends in a line break."""
    return text_table([column.head for column in columns], ([cell(row, c) for c in columns] for row in rows))


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows of texts as a Markdown table, which ends in a line break."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
