"""Chat template of a checkpoint directory: renders a conversation to a prompt. Torch-free.

Files that may contain the template, by precedence:

    chat_template.jinja                  the template itself
    additional_chat_templates/NAME.jinja further templates, by name
    tokenizer_config.json                `chat_template`: a string, or a list of {"name", "template"}
    chat_template.json                   {"chat_template": …}, written by older processors

A GGUF file has its template in the metadata.

Of several named templates, the one named `default` is used.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.chat.template_sandbox import MAX_CHARACTERS, TemplateFailure, compile_template, render
from model.gguf.container import is_gguf
from model.io.files import CheckpointError, read_json, read_text
from model.tokenizer.bos_eos import TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, read_tokenizer_config

DEFAULT_NAME = "default"

# Written after the content of a final message that is to be continued, as transformers does. A template that trims the
# content removes the space.
_CONTINUATION_MARK = "CONTINUE_FINAL_MESSAGE_TAG "

# For base models, which have no roles: messages become paragraphs, and the completion continues the last message.
PLAIN_SOURCE = "{{ bos_token }}{{ messages | map(attribute='content') | join('\\n\\n') }}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """Chat template in Jinja, with its variables.

    origin: path of the template's file, for error messages and logs.
    special_tokens: text of each special token by variable (`bos_token`, `eos_token`, …).
    unused: names of the checkpoint's other templates, which are ignored.
    """

    source: str
    origin: str
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

    def variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Return the template's variables for rendering a conversation, without message keys whose value is None."""
        return {
            **self.special_tokens,
            "messages": [{key: value for key, value in m.items() if value is not None} for m in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Render a conversation in the sandbox, without a limit of time and memory. Raises TemplateFailure.

        Args:
            messages: `{"role", "content"}` each.
            add_generation_prompt: end the text with the beginning of an assistant message, for the model to continue.
        """
        variables = self.variables(messages, add_generation_prompt=add_generation_prompt)
        return render(compile_template(self.source), variables, max_characters=MAX_CHARACTERS)


def mark_continuation(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with a marker text after the final message's content, at which `cut_at_continuation` cuts.

    Raises:
        TemplateFailure: the final message has no text.
    """
    *others, final = messages
    if not isinstance(content := final.get("content"), str):
        raise TemplateFailure(
            "the final message has no text to continue; leave out continue_final_message", by_template=True
        )
    return [*others, {**final, "content": content + _CONTINUATION_MARK}]


def cut_at_continuation(text: str) -> str:
    """Return a conversation rendered from messages of `mark_continuation`, up to the end of the final content.

    A template that trims the content trims the end of the result too.

    Raises:
        TemplateFailure: the template has not written the content of the final message.
    """
    before, mark, after = text.rpartition(_CONTINUATION_MARK.strip())
    if not mark:
        raise TemplateFailure(
            "the template does not write the content of the final message; leave out continue_final_message",
            by_template=True,
        )
    return before if after.startswith(" ") else before.rstrip()


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """Return the chat template of a checkpoint directory or GGUF file; None if it has no template.

    Raises CheckpointError, also for named templates of which none is `default`.
    """
    config = read_tokenizer_config(directory)
    found, origin = _from_files(directory), directory / TEMPLATE_FILE
    if not found:
        origin = directory if is_gguf(directory) else directory / TOKENIZER_CONFIG_FILE
        found = _from_value(origin, config.chat_template)
    if not found:
        origin = directory / "chat_template.json"
        found = _from_value(origin, read_json(origin, optional=True).get("chat_template"))
    if not found:
        return None
    if DEFAULT_NAME not in found:
        names = ", ".join(sorted(found))
        raise CheckpointError(
            f"{origin}: has templates {names}, but no template {DEFAULT_NAME}; give one with --chat-template FILE"
        )
    source = found.pop(DEFAULT_NAME)
    return ChatTemplate(source=source, origin=str(origin), special_tokens=config.roles, unused=tuple(sorted(found)))


def _from_files(directory: Path) -> dict[str, str]:
    paths = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if os.path.lexists(directory / TEMPLATE_FILE):
        paths[DEFAULT_NAME] = directory / TEMPLATE_FILE
    return {name: read_text(path) for name, path in paths.items()}


def _from_value(path: Path, value: object) -> dict[str, str]:
    """Return templates by name from a `chat_template` value: null, a string, or a list of named templates.

    A string is the template `default`. Raises CheckpointError for any other value.
    """
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
        raise CheckpointError(f'{path}: chat_template must be a string or a list of {{"name", "template"}}; correct it')
    return found
