"""The wire contract of a conversation's answers, and how a completion becomes one.

The engine completes prompts, and delivery joins completions. `Chat` says the same in the words of
`/v1/chat/completions`, and `Text` in those of `/v1/completions`, which need no translation.
"""

from typing import Any, ClassVar, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from service.responses import Completion, Timings, Usage


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer. `stop_reason`: the stop string or token id that matched."""

    index: int
    message: ChatMessage
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer as one body."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | UnsetType
    timings: Timings | UnsetType


class ChatDelta(msgspec.Struct, kw_only=True):
    """What is new in a stream: first who speaks, then text, at last perhaps nothing."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """An event of a stream. `timings` come in the last two."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class Dialect(Protocol):
    """How the completions of one request are worded."""

    id_prefix: ClassVar[str]

    def body(self, completion: Completion) -> Any:
        """The whole answer."""
        ...

    def events(self, completion: Completion) -> tuple[Any, ...]:
        """The events of a stream that say this piece of it."""
        ...


class Text:
    """`/v1/completions`: as it is."""

    id_prefix: ClassVar[str] = "cmpl-"

    def body(self, completion: Completion) -> Completion:
        """See `Dialect`."""
        return completion

    def events(self, completion: Completion) -> tuple[Completion]:
        """See `Dialect`."""
        return (completion,)


class Chat:
    """`/v1/chat/completions`: the assistant's message. One for each request: it knows who has begun to speak."""

    id_prefix: ClassVar[str] = "chatcmpl-"

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def body(self, completion: Completion) -> ChatCompletion:
        """See `Dialect`."""
        return ChatCompletion(
            id=completion.id,
            created=completion.created,
            model=completion.model,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=ChatMessage(content=choice.text),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
                for choice in completion.choices
            ],
            usage=completion.usage,
            timings=completion.timings,
        )

    def events(self, completion: Completion) -> tuple[ChatCompletionChunk, ...]:
        """See `Dialect`. A choice's first event says who speaks, and no text yet, as OpenAI's does."""
        chunk = ChatCompletionChunk(
            id=completion.id,
            created=completion.created,
            model=completion.model,
            choices=[
                ChatChunkChoice(
                    index=choice.index,
                    delta=ChatDelta(content=choice.text) if choice.text else ChatDelta(),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
                for choice in completion.choices
            ],
            usage=completion.usage,
            timings=completion.timings,
        )
        new = [choice.index for choice in completion.choices if choice.index not in self._begun]
        if not new:
            return (chunk,)
        self._begun.update(new)
        opening = ChatCompletionChunk(
            id=completion.id,
            created=completion.created,
            model=completion.model,
            choices=[ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")) for index in new],
        )
        return (opening, chunk)
