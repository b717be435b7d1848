"""Chat template of a checkpoint directory: renders a conversation to a prompt. Torch-free.

Places of a template, by precedence:

    chat_template.jinja                  the template itself
    additional_chat_templates/NAME.jinja further templates, by name
    tokenizer_config.json                `chat_template`: a string, or a list of {"name", "template"}
    chat_template.json                   {"chat_template": …}, written by older processors

Of several templates the template named `default` is used. Special tokens for templates (`bos_token` and similar) are
read from tokenizer_config.json and special_tokens_map.json, as strings or as {"content": …}.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.chat.template_sandbox import MAX_CHARACTERS, compile_template, render
from model.io import json_file
from model.io.json_file import FileError

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_DIRECTORY = "additional_chat_templates"
OLD_TEMPLATE_FILE = "chat_template.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
DEFAULT_NAME = "default"

# For base models, which have no roles: messages become paragraphs, and the completion continues the last message.
PLAIN_SOURCE = "{{ bos_token }}{{ messages | map(attribute='content') | join('\\n\\n') }}"


class ChatTemplateError(ValueError):
    """Error of an unusable chat template. One line: the file, the fault, the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """Chat template with the special tokens that are template variables.

    source: Jinja.
    origin: the template's file, for messages.
    special_tokens: `bos_token`, `eos_token` and so on, from the checkpoint's files; variables of the template.
    unused: names of the checkpoint's other templates.
    """

    source: str
    origin: str
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def variables(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> dict[str, Any]:
        """Return the template's variables. Keys whose value is None are left out of messages, as templates expect."""
        return {
            **self.special_tokens,
            "messages": [{key: value for key, value in m.items() if value is not None} for m in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Render a conversation in this process. The sandbox applies, but nothing bounds time and memory.

        Args:
            messages: `{"role", "content"}` each.
            add_generation_prompt: end with the beginning of an assistant message.

        Raises:
            TemplateFailure: the template rejected the conversation or failed; one line.
        """
        variables = self.variables(messages, add_generation_prompt=add_generation_prompt)
        return render(compile_template(self.source), variables, max_characters=MAX_CHARACTERS)


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """Read the chat template of a checkpoint directory; None if the directory has no template.

    Raises:
        ChatTemplateError: a file cannot be read, is malformed, or none of several templates is the default.
    """
    config = _read_json(directory / TOKENIZER_CONFIG_FILE)
    found = _from_files(directory)
    origin = directory / TEMPLATE_FILE
    for path, values in (
        (directory / TOKENIZER_CONFIG_FILE, config),
        (directory / OLD_TEMPLATE_FILE, {} if found else _read_json(directory / OLD_TEMPLATE_FILE)),
    ):
        if not found:
            found, origin = _from_value(path, values.get("chat_template")), path
    if not found:
        return None
    if DEFAULT_NAME not in found:
        names = ", ".join(sorted(found))
        raise ChatTemplateError(
            f"{origin}: has templates {names}, but no template {DEFAULT_NAME}; give one with --chat-template FILE"
        )
    return ChatTemplate(
        source=found[DEFAULT_NAME],
        origin=str(origin),
        special_tokens=read_special_tokens(directory),
        unused=tuple(sorted(set(found) - {DEFAULT_NAME})),
    )


def read_special_tokens(directory: Path) -> dict[str, Any]:
    """Return the text of each special token of a checkpoint directory, by template variable (`bos_token`, …).

    Raises:
        ChatTemplateError: a file cannot be read or is not a JSON object.
    """
    tokens: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE):
        for key, value in _read_json(directory / name).items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                tokens[key] = content
    return tokens


def _from_files(directory: Path) -> dict[str, str]:
    paths = {path.stem: path for path in sorted((directory / TEMPLATE_DIRECTORY).glob("*.jinja"))}
    if json_file.is_named(directory / TEMPLATE_FILE):
        paths[DEFAULT_NAME] = directory / TEMPLATE_FILE
    return {name: read_text(path) for name, path in paths.items()}


def _from_value(path: Path, value: object) -> dict[str, str]:
    """Return templates by name from a `chat_template` entry: null, a string, or a list of named templates."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_NAME: value}
    entries: Any = value if isinstance(value, list) else [value]
    try:
        found = {entry["name"]: entry["template"] for entry in entries}
    except (KeyError, TypeError):
        found = {"": None}
    if not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise ChatTemplateError(
            f'{path}: chat_template must be a string or a list of {{"name", "template"}}; correct it'
        )
    return found


def read_text(path: Path) -> str:
    """Read a UTF-8 file. Raises ChatTemplateError if the file cannot be read."""
    try:
        return json_file.read_text(path)
    except FileError as error:
        raise ChatTemplateError(f"{path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json_file.read_object(path, optional=True)
    except FileError as error:
        raise ChatTemplateError(f"{path}: {error}") from error
