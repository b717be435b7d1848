"""Request bodies with conversations: `/v1/chat/completions` and `/tokenize`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from service.protocol.completions import Count, GenerationRequest, NumLogprobs
from service.protocol.errors import InvalidRequest
from service.protocol.request_model import IGNORED, MAX_MESSAGES, ParseSpecial, RequestModel, Unsupported
from service.protocol.tools import (
    MAX_TOOLS,
    TOOL_CHOICE_ERROR,
    PastToolCall,
    ToolChoice,
    ToolDefinition,
    callable_tools,
)

MAX_PARTS = 256  # of one message
_MESSAGE_ERRORS = {
    "content": f'must be a string, or a list of up to {MAX_PARTS} {{"type": "text", "text": …}}; '
    "this server reads text only",
    "tool_choice": TOOL_CHOICE_ERROR,
    "chat_template_kwargs": "must be true, false, a number, a string or null",
}


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(RequestModel):
    """A text part of a message. The types other than `text` are those of the Responses API."""

    IGNORES_UNKNOWN: ClassVar[bool] = True

    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(RequestModel):
    """One message of a conversation. The role `developer` means `system`, and chat templates get it as `system`.

    Other roles than system, user, assistant and tool are for templates that know them.
    """

    IGNORES_UNKNOWN: ClassVar[bool] = True

    role: Annotated[str, Field(pattern=r"^[a-zA-Z0-9 _.-]{1,64}$")]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[PastToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Annotated[Any, Unsupported()] = None
    # Fields of a response message, which clients send back in the next request.
    refusal: IGNORED = None
    annotations: IGNORED = None
    audio: IGNORED = None

    @property
    def text(self) -> str:
        """Content of the message as one text; "" without content. Text parts are joined by newlines."""
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


def check_messages(messages: Sequence[Message]) -> None:
    """Raise InvalidRequest for messages that do not form a conversation.

    Only assistant messages may have tool calls, or lack content. A tool's result must name a call before it.
    """
    call_ids: set[str] = set()
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if message.role == "tool" and message.tool_call_id not in call_ids:
            problem = "is required" if message.tool_call_id is None else "names no tool call of an earlier message"
            raise InvalidRequest.of(f"{place}.tool_call_id", f" {problem}; send the id of the call")
        if message.tool_calls:
            if message.role != "assistant":
                raise InvalidRequest.of(
                    f"{place}.tool_calls", ": only assistant messages have tool calls; leave it out"
                )
            call_ids.update(call.id for call in message.tool_calls)
        elif message.content is None and message.role != "assistant":
            raise InvalidRequest.of(f"{place}.content", " is required")


def messages_for_template(messages: Sequence[Message], *, arguments_are_text: bool) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect. A tool's result gets the name of the called tool.

    arguments_are_text: leave the arguments of past calls as JSON text; else they become objects.
    Raises InvalidRequest for arguments that are not a JSON object or are too large, in both cases.
    """
    names: dict[str, str] = {}
    rendered = []
    for number, message in enumerate(messages):
        calls = []
        for call in message.tool_calls or ():
            names[call.id] = call.function.name
            arguments: Any = call.function.arguments
            if (parsed := call.function.parsed_arguments()) is None:
                place = f"messages[{number}].tool_calls"
                raise InvalidRequest.of(
                    place,
                    ": the arguments of a call must be a JSON object as text, with at most 20,000 lists and objects",
                )
            function = {"name": call.function.name, "arguments": arguments if arguments_are_text else parsed}
            calls.append({"id": call.id, "type": "function", "function": function})
        rendered.append(
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.text,
                "name": message.name or names.get(message.tool_call_id or ""),
                "reasoning_content": message.reasoning_content or message.reasoning,
                "tool_calls": calls or None,
                "tool_call_id": message.tool_call_id,
            }
        )
    return rendered


# Additional template variables, such as Qwen3's `enable_thinking`.
TemplateVariables = Annotated[dict[str, bool | int | float | str | None], Field(max_length=16)]


class ConversationFields(RequestModel):
    """Fields about the prompt of a conversation, common to chat completions and `/tokenize`."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: TemplateVariables | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None

    @property
    def adds_generation_prompt(self) -> bool:
        """True if the prompt ends with the header of a new assistant message.

        Raises InvalidRequest if `add_generation_prompt` and `continue_final_message` are both true.
        """
        asked = self.add_generation_prompt
        if asked and self.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message must not both be true; leave out one of them",
                param="continue_final_message",
            )
        return not self.continue_final_message if asked is None else asked


class ChatCompletionRequest(GenerationRequest, ConversationFields):
    """Body of `POST /v1/chat/completions`. `max_tokens` is the older name of `max_completion_tokens`."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "max_output_tokens": "max_completion_tokens",
        "input": "messages",
        "stop_sequences": "stop",
    }
    UNION_ERRORS: ClassVar[Mapping[str, str]] = {**GenerationRequest.UNION_ERRORS, **_MESSAGE_ERRORS}

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: NumLogprobs | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: Effort | None = None
    thinking_token_budget: Count | None = None
    include_reasoning: bool | None = True
    separate_reasoning: Annotated[Any, Unsupported(True)] = None
    stream_reasoning: Annotated[Any, Unsupported(True)] = None
    functions: Annotated[Any, Unsupported([], remedy="send the functions as tools")] = None
    function_call: Annotated[Any, Unsupported("none", "auto", remedy="use tool_choice")] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    audio: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported({})] = None
    documents: Annotated[Any, Unsupported([])] = None
    best_of: Annotated[Any, Unsupported(1)] = None
    prediction: IGNORED = None
    verbosity: IGNORED = None
    service_tier: IGNORED = None
    store: IGNORED = None
    echo: Annotated[Any, Unsupported(False)] = None
    chat_template: Annotated[Any, Unsupported()] = None

    def check_fields(self) -> None:
        """Raise InvalidRequest for invalid messages or tools, and for fields that contradict or need each other."""
        super().check_fields()
        check_messages(self.messages)
        _ = self.callable_tools
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest.of("top_logprobs", " needs logprobs: true; set logprobs, or leave out top_logprobs")
        _ = self.adds_generation_prompt
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            raise InvalidRequest.of(
                "max_completion_tokens", f"={new} and max_tokens={old} differ; give only one of them"
            )

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def callable_tools(self) -> tuple[list[ToolDefinition], bool]:
        """Tools that the completion may call, and True if it must call one. Raises InvalidRequest for invalid tools."""
        return callable_tools(self.tools, self.tool_choice)


class TokenizeRequest(ConversationFields):
    """Body of `POST /tokenize`: a text, or a conversation, which the chat template renders to a text first.

    `add_special_tokens` adds the begin-of-text token. The default is true for a text, and false for a conversation,
    whose template writes its own special tokens.
    """

    UNION_ERRORS: ClassVar[Mapping[str, str]] = _MESSAGE_ERRORS

    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    parse_special: ParseSpecial = None
    chat_template: None = None  # vLLM's clients send this field; only null is accepted

    def subject(self) -> str | list[Message]:
        """Return the text or the messages to tokenize. Raises InvalidRequest for missing or contradictory fields."""
        if (self.prompt is None) is (self.messages is None):
            raise InvalidRequest("the body needs either prompt or messages, and not both", param="prompt")
        others: dict[str, Any] = {"parse_special": self.parse_special}
        if self.prompt is not None:
            others = {
                "add_generation_prompt": self.add_generation_prompt,
                "continue_final_message": self.continue_final_message or None,
                "chat_template_kwargs": self.chat_template_kwargs,
            }
        subject, other = ("messages", "prompt") if self.prompt is None else ("prompt", "messages")
        for name, value in others.items():
            if value is not None:
                raise InvalidRequest.of(name, f" applies only to {other}, not to {subject}; leave it out")
        if self.messages is None:
            assert self.prompt is not None
            return self.prompt
        if not self.messages:
            raise InvalidRequest.of("messages", " must not be empty")
        check_messages(self.messages)
        return self.messages
