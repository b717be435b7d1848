"""Tags around a model's reasoning (its thinking before the answer), and tags of all formats. Torch-free.

A mark is a tag of a reasoning or tool-call format, such as <think> or <tool_call>, in most models a single token.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from model.chat.tool_formats.table import TOOL_FORMATS
from model.tokenizer.interface import Tokenizer, TokenizerError


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning of a model: text between two tags, `opening` and `closing`, at the beginning of a completion."""

    name: str
    opening: str
    closing: str


# In order of detection: the first format whose marks a template contains is the template's format.
REASONING_FORMATS = {
    form.name: form
    for form in (
        ReasoningFormat("think", "<think>", "</think>"),  # Qwen3, DeepSeek-R1, SmolLM3, Granite 4, Nemotron
        ReasoningFormat("magistral", "[THINK]", "[/THINK]"),  # Mistral's Magistral and Ministral 3
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),  # Seed-OSS
        ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    )
}


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the first format whose closing tag a chat template contains; None: no reasoning, or no known format."""
    return next((form for form in REASONING_FORMATS.values() if form.closing in template), None)


def begins_in_reasoning(prompt: str, form: ReasoningFormat, prefill: str = "") -> bool | None:
    """Return True if a rendered prompt ends inside reasoning, False if after it; None: the model decides.

    A template of a model that always reasons ends the prompt with the opening tag. A template whose reasoning is
    switched off ends the prompt with an empty reasoning, and so with the closing tag.

    prefill: beginning of the completion that the prompt already contains. If not blank, it alone decides: True or
        False.
    """
    if begun := prefill.strip():
        return begun.startswith(form.opening) and form.closing not in begun
    end = prompt.rstrip()
    if end.endswith(form.opening):
        return True
    return False if end.endswith(form.closing) else None


def all_marks() -> tuple[str, ...]:
    """Return the tags of all reasoning and tool-call formats, such as <think> and <tool_call>, without duplicates."""
    reasoning = [mark for form in REASONING_FORMATS.values() for mark in (form.opening, form.closing)]
    return tuple(dict.fromkeys([*reasoning, *(mark for form in TOOL_FORMATS.values() for mark in form.marks)]))


def mark_ids(tokenizer: Tokenizer, names: Iterable[str]) -> dict[str, int]:
    """Return the token id of each tag in `names`, by tag. A tag that the tokenizer splits or lacks is left out."""
    found: dict[str, int] = {}
    for name in names:
        # Characters of a mark may be missing in a small vocabulary.
        with suppress(TokenizerError):
            ids = tokenizer.encode(name, parse_special=True)
            if len(ids) == 1:
                found[name] = ids[0]
    return found
