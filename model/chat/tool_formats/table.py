"""Table of tool formats. To add a format: write its class, and add it before less specific formats."""

from collections.abc import Iterable

from model.chat.reasoning import REASONING_FORMATS
from model.chat.tool_formats.json_calls import Hermes
from model.chat.tool_formats.tool_format import ToolFormat
from model.tokenizer.interface import Tokenizer

DEFAULT_FORMAT = Hermes()
# In order of detection: the first format that a template uses is the template's format.
TOOL_FORMATS: dict[str, ToolFormat] = {form.name: form for form in (DEFAULT_FORMAT,)}


def find_tool_format(template: str) -> ToolFormat | None:
    """Return the format in which a chat template writes tool calls; None if the template has no tool calls."""
    if "tool" not in template:
        return None
    return next((form for form in TOOL_FORMATS.values() if form.is_used_by(template)), None)


def all_marks() -> tuple[str, ...]:
    """Return the names of all formats' marks, without duplicates."""
    reasoning = [mark for form in REASONING_FORMATS.values() for mark in (form.opening, form.closing)]
    return tuple(dict.fromkeys([*reasoning, *(mark for form in TOOL_FORMATS.values() for mark in form.marks)]))


def mark_ids(tokenizer: Tokenizer, names: Iterable[str]) -> dict[str, int]:
    """Return the ids of those marks that are single tokens of a tokenizer, by name."""
    found = {name: tokenizer.encode(name, parse_special=True) for name in names}
    return {name: ids[0] for name, ids in found.items() if len(ids) == 1}
