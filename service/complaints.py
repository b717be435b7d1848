"""Pydantic's complaints in our words, for flags, variables and JSON alike."""

import json
import re
from collections.abc import Container

# Pydantic's names of what can be wrong (https://docs.pydantic.dev/latest/errors/validation_errors/); others keep
# pydantic's words.
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


def in_words(kind: str, message: str) -> str:
    """What must be otherwise, to follow a field's name: "must be a whole number".

    Args:
        kind: the `type` of pydantic's complaint.
        message: its `msg`.
    """
    if kind in ("string_too_short", "too_short") and " at least 1 " in message:
        return EMPTY
    message = message.removeprefix("Value error, ")
    return _WORDS.get(kind, re.sub(r"^\w+ should", "must", message).replace(" after validation", ""))


def unknown_field(fields: Container[str], body: bytes) -> str | None:
    """The first name of a JSON object that is none of the fields: a misspelt one is why another is missing."""
    return next((name[:100] for name in json.loads(body) if name not in fields), None)
