"""Rewording of pydantic's validation errors for flags, environment variables and JSON."""

import json
import re
from collections.abc import Container

# By pydantic's error type (https://docs.pydantic.dev/latest/errors/validation_errors/). Others keep pydantic's message.
_WORDS = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
}
EMPTY = "must not be empty"


def reword(kind: str, message: str) -> str:
    """Return a message such as "must be a whole number" for a pydantic error of type `kind` with text `message`."""
    if kind in ("string_too_short", "too_short") and " at least 1 " in message:
        return EMPTY
    message = message.removeprefix("Value error, ")
    return _WORDS.get(kind, re.sub(r"^\w+ should", "must", message).replace(" after validation", ""))


def unknown_field(fields: Container[str], body: bytes) -> str | None:
    """Return the first key of the JSON object `body` that is not in `fields`, cut to 100 characters; else None.

    The error about a missing field names this key, because it may be the misspelt name of that field.
    """
    return next((name[:100] for name in json.loads(body) if name not in fields), None)
