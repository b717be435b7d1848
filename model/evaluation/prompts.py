"""The fixed prompts of every model card, and how they become token ids of a checkpoint. Torch-free."""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from model.chat_template import PLAIN_SOURCE, ChatTemplate, load_chat_template, read_special_tokens
from model.tokenizer.interface import Tokenizer


class PromptKind(StrEnum):
    """What a prompt asks for: a text to be continued, or a message to be answered."""

    STORY = "story"
    FACT = "fact"
    DIALOGUE = "dialogue"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text; of kind CHAT it is what a user says."""

    kind: PromptKind
    text: str


# Fixed, so that cards can be compared: never chosen by what a model makes of them.
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
    """The chat template of a checkpoint directory with the marks it may write; the plain one where it has none, as
    the service does.

    Raises:
        ChatTemplateError: a file cannot be read or is malformed.
    """
    template = load_chat_template(directory)
    if template is None:
        template = ChatTemplate(source=PLAIN_SOURCE, origin="plain")
    marks = {"bos_token": tokenizer.bos_token_id, "eos_token": next(iter(tokenizer.eos_token_ids), None)}
    own = {name: tokenizer.token_name(token_id) for name, token_id in marks.items() if token_id is not None}
    return dataclasses.replace(template, special_tokens={**own, **read_special_tokens(directory)})


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    """A prompt's token ids as the service makes them: a text after the mark that begins one, a message by the template.

    Raises:
        TemplateFailure: the template refused the message, or failed.
        TokenizerError: the text is beyond the tokenizer's means.
    """
    if prompt.kind is PromptKind.CHAT:
        rendered = template.render([{"role": "user", "content": prompt.text}])
        return tokenizer.encode(rendered, parse_special=True)
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [*begin, *tokenizer.encode(prompt.text)]
