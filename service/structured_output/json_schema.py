"""Preparation of a JSON Schema for llguidance.

Parts that llguidance would enforce wrongly are rejected with their path, or narrowed to values that it enforces.
Every value except data (`const`, `enum`) is treated as a schema, even under unknown keywords: a `$ref` may point there.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from model.structured_output.grammar import GrammarError

# llguidance computes with doubles, as most JSON parsers do. RFC 8259, section 6: parsers agree on integers up to this.
LARGEST_INTEGER = 2**53 - 1
_LONGEST_PLACE = 100
_LONGEST_NUMBER = 30
# Keywords that map names to schemas. Other keywords have a schema or a list of schemas as their value.
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum")
_NOTES = ("default", "examples")  # annotations, which constrain nothing
# An inclusive bound is narrowed to the largest exact integer, and an exclusive bound to that integer plus one.
_LOWER = {"minimum": -LARGEST_INTEGER, "exclusiveMinimum": -LARGEST_INTEGER - 1}
_UPPER = {"maximum": LARGEST_INTEGER, "exclusiveMaximum": LARGEST_INTEGER + 1}
_WRITABLE = frozenset(
    "\b\t\n\f\r"
)  # control characters with a short JSON escape such as \n; see `model.structured_output.grammar`


def prepared(schema: Mapping[str, Any], *, lenient: bool) -> dict[str, Any]:
    """Return the schema in the form that llguidance receives.

    Raises:
        GrammarError: the schema cannot be enforced; the message says where.
    """
    return _prepared(schema, "", lenient=lenient)


def at(place: str, complaint: str) -> GrammarError:
    """Return an error that names a path in the schema. A long path loses its beginning."""
    place = place.lstrip(".")
    if len(place) > _LONGEST_PLACE:
        place = "…" + place[-_LONGEST_PLACE:]
    return GrammarError(f"at {place}: {complaint}" if place else complaint)


def _prepared(schema: Mapping[str, Any], place: str, *, lenient: bool) -> dict[str, Any]:
    if "x-guidance" in schema:
        raise at(place, "x-guidance is not supported; remove it")
    if not lenient:
        _check_count(schema, place)
    ready: dict[str, Any] = {}
    for key, value in schema.items():
        below = f"{place}.{key}"
        if key in _NOTES:
            continue
        if key in _DATA:
            for data_place, leaf in _leaves(value, below):
                _check_data(leaf, data_place)
            ready[key] = value
        elif key in NAMED and isinstance(value, dict):
            ready[key] = {
                name: _prepared(part, f"{below}.{name}", lenient=lenient) if isinstance(part, dict) else part
                for name, part in value.items()
            }
        elif isinstance(value, dict):
            ready[key] = _prepared(value, below, lenient=lenient)
        elif isinstance(value, list):
            ready[key] = [
                _prepared(part, f"{below}[{number}]", lenient=lenient) if isinstance(part, dict) else part
                for number, part in enumerate(value)
            ]
        else:
            ready[key] = _prepared_number(key, value, below) if _is_number(value) else value
    return ready


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _prepared_number(key: str, value: float, place: str) -> float:
    """Return the number of a keyword. A bound beyond the exact integers is narrowed to the largest exact integer."""
    if math.isfinite(value) and value < _LOWER.get(key, value):
        return _LOWER[key]
    if math.isfinite(value) and value > _UPPER.get(key, value):
        return _UPPER[key]
    _check_data(value, place)
    return value


def _check_data(value: object, place: str) -> None:
    """Check that llguidance generates this number or string of a schema (`const`, `enum`) exactly as written.

    Raises:
        GrammarError: the value would be changed, or cannot be generated.
    """
    if _is_number(value):
        assert isinstance(value, int | float)
        written = str(value)
        if len(written) > _LONGEST_NUMBER:
            written = f"{written[:_LONGEST_NUMBER]}…"
        if isinstance(value, float) and not math.isfinite(value):
            raise at(place, f"{written} is not a JSON number")
        if abs(value) > LARGEST_INTEGER:
            raise at(place, f"{written} is beyond ±(2^53 - 1), where JSON numbers are no longer exact")
    elif isinstance(value, str) and any(not (c >= " " or c in _WRITABLE) or c == "\x7f" for c in value):
        raise at(place, "a control character that needs a \\u escape cannot be generated; remove it")


def _leaves(value: object, place: str) -> Iterator[tuple[str, object]]:
    """Yield the paths and scalars in data."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, f"{place}.{name}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{place}[{number}]")
    else:
        yield place, value


def _check_count(schema: Mapping[str, Any], place: str) -> None:
    """Check that `minProperties` can be enforced.

    The grammar lets a key that the schema does not name occur twice, so two such keys may be the same key.

    Raises:
        GrammarError: `minProperties` needs two or more keys that the schema does not name.
    """
    least, required = schema.get("minProperties"), schema.get("required")
    has_free_keys = schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    if not _is_number(least) or not has_free_keys:
        return
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    assert isinstance(least, int | float)
    if least > named + 1:
        raise at(
            place,
            f"minProperties: {least} with {named} required cannot be enforced, because keys that are not named in the "
            f"schema may repeat; list more keys in required, or set minProperties to {named + 1} at most",
        )
