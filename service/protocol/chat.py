"""Request schemas with conversations: `/v1/chat/completions` and `/tokenize`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from service.protocol.completions import MAX_MESSAGES, MAX_PARTS, Count, GenerationRequest, NumLogprobs, RequestModel
from service.protocol.errors import InvalidRequest

# Joins the text parts of one message, since templates expect one string.
_BETWEEN_PARTS = "\n"


class TextPart(RequestModel):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class Message(RequestModel):
    """One message. The role `developer` is OpenAI's newer name of `system`, and is passed to templates as `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
    name: str | None = None
    # Fields of a response message, which clients send back in the next request. Only empty values are accepted.
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as a chat template expects it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": _BETWEEN_PARTS.join(parts), "name": self.name}


# Additional template variables, such as Qwen3's `enable_thinking`.
TemplateVariables = Annotated[dict[str, bool | int | float | str | None], Field(max_length=16)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def message_parts(messages: Sequence[Message]) -> Iterator[tuple[str, RequestModel]]:
    """Yield every message and every message part, each with the path that prefixes its field names in errors."""
    for number, message in enumerate(messages):
        yield f"messages[{number}].", message
        if not isinstance(message.content, str):
            for part_number, part in enumerate(message.content):
                yield f"messages[{number}].content[{part_number}].", part


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`. `max_tokens` is the older name of `max_completion_tokens`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.NEUTRAL,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "metadata": ({},),
        "echo": (False,),
        "continue_final_message": (False,),
        "chat_template": (),
    }

    messages: Messages
    max_completion_tokens: Count | None = None
    add_generation_prompt: bool | None = True
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    logprobs: bool | None = False
    top_logprobs: NumLogprobs | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[Any] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    echo: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables | None = None

    def parts(self) -> Iterator[tuple[str, RequestModel]]:
        """See `RequestModel`."""
        yield from super().parts()
        yield from message_parts(self.messages)

    def check_together(self) -> None:
        """See `GenerationRequest`. `top_logprobs` above 0 without `logprobs` is an error."""
        super().check_together()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")

    @property
    def num_logprobs(self) -> int | None:
        """See `GenerationRequest`."""
        if not self.logprobs:
            return None
        return 0 if self.top_logprobs is None else self.top_logprobs

    @property
    def max_allowed_tokens(self) -> int | None:
        """Limit on completion tokens; None if the request sets no limit.

        Raises:
            InvalidRequest: `max_completion_tokens` and `max_tokens` differ.
        """
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            raise InvalidRequest(
                f"max_completion_tokens={new} and max_tokens={old} differ; give one of them",
                param="max_completion_tokens",
            )
        return old if new is None else new


class TokenizeRequest(RequestModel):
    """`POST /tokenize`: a text, or a conversation as the model would receive it.

    `add_special_tokens` adds the begin-of-text token. The default is true for a text, and false for a conversation,
    whose template writes its own special tokens.
    """

    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool | None = None
    # Fields that vLLM's clients send. Only values without effect are accepted.
    continue_final_message: Literal[False] | None = None
    chat_template: None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None

    def parts(self) -> Iterator[tuple[str, RequestModel]]:
        """See `RequestModel`."""
        yield "", self
        yield from message_parts([] if self.messages is None else self.messages)

    def subject(self) -> str | list[Message]:
        """Return the text or the messages to tokenize.

        Raises:
            InvalidRequest: prompt and messages are both given or both missing, messages is empty, or a field needs
                messages and there is only a prompt.
        """
        if self.messages is not None:
            if self.prompt is not None:
                raise InvalidRequest("give prompt or messages, not both", param="messages")
            if not self.messages:
                raise InvalidRequest("messages must not be empty", param="messages")
            return self.messages
        if self.prompt is None:
            raise InvalidRequest("prompt is required, or messages", param="prompt")
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{name} needs messages", param=name)
        return self.prompt
