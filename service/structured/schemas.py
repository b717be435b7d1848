"""A schema made ready for the library: what it would get wrong is refused with its place, or narrowed to what is right.

Everything but data (`const`, `enum`) is read as schemas, unknown keywords too: a `$ref` may point anywhere.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from model.grammar import GrammarError

# The library computes with doubles, as most readers of JSON do: RFC 8259, section 6, names the integers all agree on.
LARGEST_INTEGER = 2**53 - 1
_LONGEST_PLACE = 100
_LONGEST_NUMBER = 30
# Where schemas stand in a schema: by names of their own. Elsewhere they stand by a key, or in a list.
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum")
_NOTES = ("default", "examples")  # data that nothing has to follow
# An inclusive bound narrows to the largest integer, an exclusive one to the one beyond.
_LOWER = {"minimum": -LARGEST_INTEGER, "exclusiveMinimum": -LARGEST_INTEGER - 1}
_UPPER = {"maximum": LARGEST_INTEGER, "exclusiveMaximum": LARGEST_INTEGER + 1}
_WRITABLE = frozenset("\b\t\n\f\r")  # the control characters that JSON has a letter for; see `model.grammar`


def prepared(schema: Mapping[str, Any], *, lenient: bool) -> dict[str, Any]:
    """The schema as the library is given it.

    Raises:
        GrammarError: it cannot be followed; says where.
    """
    return _prepared(schema, "", lenient=lenient)


def at(place: str, complaint: str) -> GrammarError:
    """A complaint with the place that it is about, shortened from its front."""
    place = place.lstrip(".")
    if len(place) > _LONGEST_PLACE:
        place = "…" + place[-_LONGEST_PLACE:]
    return GrammarError(f"at {place}: {complaint}" if place else complaint)


def _prepared(schema: Mapping[str, Any], place: str, *, lenient: bool) -> dict[str, Any]:
    if "x-guidance" in schema:
        raise at(place, "x-guidance is not taken: the form of a document is the server's")
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
    """A keyword's number. A bound that lies further out than integers are exact is moved in to where they are."""
    if math.isfinite(value) and value < _LOWER.get(key, value):
        return _LOWER[key]
    if math.isfinite(value) and value > _UPPER.get(key, value):
        return _UPPER[key]
    _check_data(value, place)
    return value


def _check_data(value: object, place: str) -> None:
    """Raises: GrammarError: a number or a text that would come out as another one, or not at all."""
    if _is_number(value):
        assert isinstance(value, int | float)
        written = str(value)
        if len(written) > _LONGEST_NUMBER:
            written = f"{written[:_LONGEST_NUMBER]}…"
        if isinstance(value, float) and not math.isfinite(value):
            raise at(place, f"{written} is not a number of JSON")
        if abs(value) > LARGEST_INTEGER:
            raise at(place, f"{written} is beyond ±(2^53 - 1), where numbers of JSON are no longer exact")
    elif isinstance(value, str) and any(not (c >= " " or c in _WRITABLE) or c == "\x7f" for c in value):
        raise at(place, "a control character that is written as \\u cannot be part of a document")


def _leaves(value: object, place: str) -> Iterator[tuple[str, object]]:
    """What is neither list nor object in data, and where."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, f"{place}.{name}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{place}[{number}]")
    else:
        yield place, value


def _check_count(schema: Mapping[str, Any], place: str) -> None:
    """Keys that have no name in the schema may repeat, so that two of them may be one.

    Raises:
        GrammarError: `minProperties` asks for two or more of them.
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
            f"minProperties: {least} with {named} required cannot be enforced: keys without a name of their own "
            f"may repeat; name them in required, or ask for {named + 1} at most",
        )
