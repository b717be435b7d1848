"""Preparation of a client's JSON Schema for llguidance, which would enforce some keywords wrongly."""

import math
from collections.abc import Mapping
from typing import Any

from model.structured_output.grammar import GrammarError

# llguidance computes with doubles, as most JSON parsers do. RFC 8259, section 6: parsers agree on integers up to this.
LARGEST_INTEGER = 2**53 - 1
_LONGEST_PLACE = 100
_LONGEST_NUMBER = 30
# Keywords that map names to schemas. Other keywords have a schema or a list of schemas as their value.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum")
_NOTES = ("default", "examples")  # annotations, which constrain nothing
# An inclusive bound is narrowed to the largest exact integer, and an exclusive bound to that integer plus one.
_LOWER = {"minimum": -LARGEST_INTEGER, "exclusiveMinimum": -LARGEST_INTEGER - 1}
_UPPER = {"maximum": LARGEST_INTEGER, "exclusiveMaximum": LARGEST_INTEGER + 1}
_WRITABLE = frozenset(
    "\b\t\n\f\r"
)  # control characters with a short JSON escape such as \n; see `model.structured_output.grammar`


def prepare_schema(schema: Any, place: str = "", *, lenient: bool) -> Any:
    """Return a JSON Schema in the form that llguidance receives. A value that is not an object is returned unchanged.

    The keywords `default` and `examples` are left out.
    A minimum is raised to at least -(2^53 - 1), and a maximum lowered to at most 2^53 - 1. Every value except data
    (`const`, `enum`) is treated as a schema, even under an unknown keyword, because a `$ref` may point there.

    Args:
        place: path of this part in the client's whole schema, for error messages.
        lenient: accept a `minProperties` that cannot be enforced, instead of raising an error.

    Raises:
        GrammarError: llguidance would enforce the schema wrongly; the message begins with the path of the keyword.
    """
    if not isinstance(schema, dict):
        return schema
    if "x-guidance" in schema:
        raise _error(place, "the keyword x-guidance is not supported; remove it")
    if not lenient:
        _check_count(schema, place)
    ready: dict[str, Any] = {}
    for key, value in schema.items():
        below = f"{place}.{key}"
        if key in _NOTES:
            continue
        if key in _DATA:
            _check_data(value, below)
            ready[key] = value
        elif key in _NAMED and isinstance(value, dict):
            ready[key] = {
                name: prepare_schema(part, f"{below}.{name}", lenient=lenient) for name, part in value.items()
            }
        elif isinstance(value, list):
            ready[key] = [prepare_schema(part, f"{below}[{i}]", lenient=lenient) for i, part in enumerate(value)]
        elif _is_number(value):
            ready[key] = min(max(value, _LOWER.get(key, value)), _UPPER.get(key, math.inf))
            if ready[key] == value or not math.isfinite(value):
                _check_data(value, below)
        else:
            ready[key] = prepare_schema(value, below, lenient=lenient)
    return ready


def _error(place: str, complaint: str) -> GrammarError:
    """Return an error whose message begins with a path in the schema. A long path is cut at its beginning."""
    place = place.lstrip(".")
    if len(place) > _LONGEST_PLACE:
        place = "…" + place[-_LONGEST_PLACE:]
    return GrammarError(f"at {place}: {complaint}" if place else complaint)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_data(value: object, place: str) -> None:
    """Raise GrammarError if a schema's value contains a number or string that llguidance cannot write exactly."""
    if isinstance(value, dict):
        for name, part in value.items():
            _check_data(part, f"{place}.{name}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            _check_data(part, f"{place}[{number}]")
    elif isinstance(value, str) and any(not (c >= " " or c in _WRITABLE) or c == "\x7f" for c in value):
        raise _error(place, "a control character that needs a \\u escape cannot be generated; remove the character")
    elif isinstance(value, int | float):
        written = f"{str(value)[:_LONGEST_NUMBER]}…" if len(str(value)) > _LONGEST_NUMBER else str(value)
        if isinstance(value, float) and not math.isfinite(value):
            raise _error(place, f"{written} is not a JSON number; replace it")
        if abs(value) > LARGEST_INTEGER:
            raise _error(place, f"{written} is beyond ±(2^53 - 1), where JSON numbers are no longer exact; replace it")


def _check_count(schema: Mapping[str, Any], place: str) -> None:
    """Raise GrammarError if `minProperties` needs two or more keys that the schema does not name.

    The grammar lets such a key occur twice, so two occurrences may be the same key.
    """
    least, required = schema.get("minProperties", 0), schema.get("required")
    has_free_keys = schema.get("additionalProperties") is not False or bool(schema.get("patternProperties"))
    if not has_free_keys or not _is_number(least):
        return
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    if least > named + 1:
        raise _error(
            place,
            f"minProperties: {least} with {named} required cannot be enforced, because keys that are not named in the "
            f"schema may repeat; list more keys in required, or set minProperties to {named + 1} at most",
        )
