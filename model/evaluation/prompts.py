"""The fixed prompts of every model card, and their encoding to token ids. Torch-free."""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from model.chat.template import PLAIN_SOURCE, ChatTemplate, load_chat_template, read_special_tokens
from model.tokenizer.interface import Tokenizer


class PromptKind(StrEnum):
    """Kind of a fixed prompt: CHAT is a user message to reply to, other kinds are texts to continue."""

    STORY = "story"
    FACT = "fact"
    DIALOGUE = "dialogue"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text to complete for a model card, or a user message to reply to. kind: None if the prompt is not fixed."""

    kind: PromptKind | None
    text: str


# Fixed, so that model cards can be compared. The prompts are never selected by a model's completions.
PROMPTS = (
    Prompt(PromptKind.STORY, "Once upon a time, there was a little girl named Lily."),
    Prompt(PromptKind.STORY, "One day, a small dog found a red ball in the park."),
    Prompt(PromptKind.STORY, "The old king had three sons."),
    Prompt(PromptKind.STORY, "In a dark forest there lived a witch who"),
    Prompt(PromptKind.STORY, "Tom and his sister wanted to build a boat."),
    Prompt(PromptKind.STORY, "A hungry fox met a clever crow. The fox said,"),
    Prompt(PromptKind.FACT, "The capital of France is"),
    Prompt(PromptKind.FACT, "The Sun is"),
    Prompt(PromptKind.FACT, "A cat is a small animal that"),
    Prompt(PromptKind.FACT, "The largest ocean on Earth is"),
    Prompt(PromptKind.FACT, "Albert Einstein was"),
    Prompt(PromptKind.DIALOGUE, "User: I want to book a table at a restaurant.\nAssistant:"),
    Prompt(PromptKind.DIALOGUE, "User: What is the weather like in London today?\nAssistant:"),
    Prompt(PromptKind.DIALOGUE, '"Where are you going?" asked the bear.'),
    Prompt(PromptKind.DIALOGUE, '"I am so sorry," said Anna.'),
    Prompt(PromptKind.CHAT, "Hello! Who are you?"),
    Prompt(PromptKind.CHAT, "Tell me a short story about a cat."),
    Prompt(PromptKind.CHAT, "What is the Moon?"),
    Prompt(PromptKind.CHAT, "I need a taxi to the airport."),
    Prompt(PromptKind.CHAT, "Write a story about a brave little mouse."),
)


def read_template(directory: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Load the chat template of a checkpoint directory; without one, return the plain template, as the service does.

    Raises:
        ChatTemplateError: a file cannot be read or is malformed.
    """
    template = load_chat_template(directory)
    if template is None:
        template = ChatTemplate(source=PLAIN_SOURCE, origin="plain")
    marks = {"bos_token": tokenizer.bos_token_id, "eos_token": next(iter(tokenizer.eos_token_ids), None)}
    own = {name: tokenizer.format_token_name(token_id) for name, token_id in marks.items() if token_id is not None}
    return dataclasses.replace(template, special_tokens={**own, **read_special_tokens(directory)})


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    """Return the token ids of a prompt as the service encodes it: a text after BOS, a message by the chat template."""
    if prompt.kind is PromptKind.CHAT:
        rendered = template.render([{"role": "user", "content": prompt.text}])
        return tokenizer.encode(rendered, parse_special=True)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [*begin, *tokenizer.encode(prompt.text)]
