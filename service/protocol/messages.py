"""Request and response bodies of `/v1/messages`, Anthropic's Messages API. A request becomes a chat completion."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from service.protocol import responses
from service.protocol.chat import ChatCompletionRequest, Effort, Message
from service.protocol.completions import MAX_STOPS, Count, StopString, StreamOptions, Timeout
from service.protocol.errors import ApiError, InvalidRequest, ThreadUnsupported
from service.protocol.request_model import IGNORED, MAX_MESSAGES, RequestModel, Unsupported
from service.protocol.response_format import JsonSchemaFormat, ResponseFormat, Schema
from service.protocol.tools import (
    MAX_TOOLS,
    CalledFunction,
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    PastToolCall,
    ToolDefinition,
    ToolName,
)

_BLOCKS = "must be a string, or a list of blocks of the types"
# Fields with the same name and meaning in a chat completion request.
_SAME_FIELDS = ("model", "temperature", "top_p", "top_k", "stream", "timeout")


class ContentBlock(RequestModel):
    """Block of a message's content. `type` says which of the other fields it has."""

    IGNORES_UNKNOWN: ClassVar[bool] = True

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Annotated[Any, Field(description="of a tool_result: a string, or a list of text blocks")] = None
    is_error: bool | None = None


class PlacedBlock:
    """Content block with its place in the request, such as `messages[0].content[1]`."""

    def __init__(self, place: str, block: ContentBlock) -> None:
        self.place = place
        self.block = block

    def get(self, name: str) -> Any:
        """Return a field of the content block. Raises InvalidRequest if it is missing."""
        if (value := getattr(self.block, name)) is None:
            raise InvalidRequest.of(f"{self.place}.{name}", " is required")
        return value

    def check_type(self, types: Sequence[str], where: str) -> None:
        """Raise InvalidRequest unless the block's type is one of `types`. `where` names the message in the error."""
        if self.block.type in types:
            return
        if self.block.type in ("image", "document", "search_result"):
            problem = f"{self.block.type} blocks are not supported: this server reads text only; send a text block"
        else:
            problem = f"{where} cannot have blocks of type {self.block.type[:50]!r}; use {', '.join(types)}"
        raise InvalidRequest.of(self.place, f": {problem}")

    def result(self) -> str:
        """Return the text of this tool_result block. If its tool failed, the text begins with `Error: `.

        Raises InvalidRequest for content other than text.
        """
        content, param = self.block.content, f"{self.place}.content"
        if content is None or isinstance(content, str):
            text = content or ""
        else:
            parts = content if isinstance(content, list) else [None]
            if image := next((part for part in parts if isinstance(part, dict) and part.get("type") != "text"), None):
                kind = ContentBlock.model_construct(type=str(image.get("type")))
                PlacedBlock(param, kind).check_type(["text"], "a tool_result")
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
                raise InvalidRequest.of(param, " must be a string, or a list of text blocks")
            text = "\n".join(str(part["text"]) for part in parts if part)
        return f"Error: {text}" if self.block.is_error else text


class ConversationMessage(RequestModel):
    """Field `messages[]`. Consecutive messages of the same role are one turn."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[ContentBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class CustomTool(RequestModel):
    """Field `tools[]`: a tool that the client runs. `input_schema` is a JSON Schema of the input."""

    IGNORES_UNKNOWN: ClassVar[bool] = True

    type: str | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def definition(self, place: str) -> ToolDefinition:
        """Return the tool, which is at `place` in the request, in OpenAI's form.

        Raises InvalidRequest for a tool that the server would have to run, or without a schema of type object.
        """
        if self.type not in (None, "custom"):
            raise InvalidRequest.of(
                f"{place}.type",
                f": {str(self.type)[:50]!r} is not supported, because this server runs no tools; "
                "send a tool with an input_schema",
            )
        param = f"{place}.input_schema"
        if self.input_schema is None:
            raise InvalidRequest.of(param, " is required")
        if self.input_schema.get("type", "object") != "object":
            raise InvalidRequest.of(param, " must be a JSON Schema of type object")
        function = FunctionDefinition.model_construct(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return ToolDefinition.model_construct(type="function", function=function)


class MessagesToolChoice(RequestModel):
    """Field `tool_choice`. `any`: some tool must be called; `tool`: the tool `name` must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False


class ThinkingConfig(RequestModel):
    """Field `thinking`: reasoning. `disabled`: none; `budget_tokens`: maximum tokens; display `omitted`: hide it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(RequestModel):
    """Field `output_config.format`: JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(RequestModel):
    """Field `output_config`. `effort`: as `reasoning_effort` of chat completions."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class MessagesChat(ChatCompletionRequest):
    """Chat completion request that generates a message. A `max_tokens` beyond the context is lowered to fit."""

    @property
    def fits_context(self) -> bool:
        return True


class CountTokensRequest(RequestModel):
    """Body of `POST /v1/messages/count_tokens`. It may have all fields of a message request."""

    UNION_ERRORS: ClassVar[Mapping[str, str]] = {
        "content": f"{_BLOCKS} text, thinking, tool_use and tool_result",
        "system": f"{_BLOCKS[:-1]} text",
    }

    messages: Annotated[list[ConversationMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    system: str | Annotated[list[ContentBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="0 or -1: no limit")] | None = None
    tools: Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, Field(description="older name of output_config.format")] = None
    timeout: Timeout | None = None
    mcp_servers: Annotated[Any, Unsupported([])] = None
    container: Annotated[Any, Unsupported()] = None
    thread: Annotated[Any, Field(description="rejected; Anthropic's SDK then sends whole conversations")] = None
    # Fields that are accepted and ignored.
    metadata: IGNORED = None
    service_tier: IGNORED = None
    cache_control: IGNORED = None
    context_management: IGNORED = None
    inference_geo: IGNORED = None
    speed: IGNORED = None
    diagnostics: IGNORED = None

    def check_fields(self) -> None:
        """Raise ThreadUnsupported for a request that continues a thread, a conversation held by the server."""
        if self.thread is not None:
            message = "thread is not supported: this server holds no conversations; leave it out"
            raise ThreadUnsupported(message, param="thread")

    def chat(self) -> ChatCompletionRequest:
        """Return the chat completion request that generates the message. Raises InvalidRequest if it is invalid."""
        fields = {name: value for name in _SAME_FIELDS if (value := getattr(self, name)) is not None}
        choice = self.tool_choice
        tools = [tool.definition(f"tools[{number}]") for number, tool in enumerate(self.tools or ())]
        chat = MessagesChat.model_construct(
            **fields,
            messages=self._chat_messages(),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream_options=StreamOptions(include_usage=True) if self.stream else None,
            continue_final_message=self.messages[-1].role == "assistant",
            tools=tools,
            tool_choice=_chat_tool_choice(choice, has_tools=bool(tools)),
            parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
            response_format=self._response_format(),
            **self._reasoning_fields(),
        )
        chat.check_fields()
        return chat

    def _reasoning_fields(self) -> dict[str, Any]:
        """Return the chat completion fields that turn reasoning on or off, limit reasoning, or hide it."""
        effort = None if self.output_config is None else self.output_config.effort
        if self.thinking is None:
            return {"reasoning_effort": effort}
        if self.thinking.type == "disabled":
            return {"reasoning_effort": "none"}
        return {
            "reasoning_effort": effort or "high",
            "thinking_token_budget": self.thinking.budget_tokens,
            "include_reasoning": self.thinking.display != "omitted",
        }

    def _response_format(self) -> ResponseFormat | None:
        new = None if self.output_config is None else self.output_config.format
        if new is not None and self.output_format is not None:
            raise InvalidRequest("give only one of output_config.format and output_format", param="output_format")
        if (wanted := new or self.output_format) is None:
            return None
        schema = JsonSchemaFormat.model_construct(name="output", schema_=wanted.schema_)
        return ResponseFormat.model_construct(type="json_schema", json_schema=schema)

    def _chat_messages(self) -> list[Message]:
        found: list[Message] = []
        if self.system:
            found.append(_system_message(_placed(self.system, "system")))
        call_ids: set[str] = set()
        for role, turn in itertools.groupby(enumerate(self.messages), lambda placed: placed[1].role):
            blocks = [
                each for number, message in turn for each in _placed(message.content, f"messages[{number}].content")
            ]
            if role == "user":
                found += _user_messages(blocks, call_ids)
            else:
                found.append(_system_message(blocks) if role == "system" else _assistant_message(blocks, call_ids))
        if self.messages[-1].role == "assistant" and found[-1].tool_calls:
            param = f"messages[{len(self.messages) - 1}]"
            raise InvalidRequest.of(param, ": the last message calls a tool; add a user message with the tool_result")
        return found


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
    }
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]


def _placed(content: str | Sequence[ContentBlock], place: str) -> list[PlacedBlock]:
    """Return the blocks of the content at `place` in the request. A string becomes one text block."""
    if isinstance(content, str):
        return [PlacedBlock(place, ContentBlock.model_construct(type="text", text=content))]
    return [PlacedBlock(f"{place}[{number}]", block) for number, block in enumerate(content)]


def _text(blocks: Sequence[PlacedBlock], where: str) -> str:
    """Return the texts of text blocks, joined by line breaks. Raises InvalidRequest for a block of another type."""
    for each in blocks:
        each.check_type(["text"], where)
    return "\n".join(each.get("text") for each in blocks)


def _system_message(blocks: Sequence[PlacedBlock]) -> Message:
    return Message.model_construct(role="system", content=_text(blocks, "a system message"))


def _user_messages(blocks: Sequence[PlacedBlock], call_ids: set[str]) -> Iterator[Message]:
    """Yield the messages of a user's turn: the results of tools, which chat templates expect first, then the text.

    Raises InvalidRequest for a result that names none of `call_ids`, the tool calls so far.
    """
    results = [each for each in blocks if each.block.type == "tool_result"]
    for each in results:
        if (call_id := each.get("tool_use_id")) not in call_ids:
            param = f"{each.place}.tool_use_id"
            raise InvalidRequest.of(param, " names no tool_use block of an earlier message; send the id of the block")
        yield Message.model_construct(role="tool", tool_call_id=call_id, content=each.result())
    texts = [each for each in blocks if each.block.type != "tool_result"]
    for each in texts:
        each.check_type(["text", "tool_result"], "a user message")
    if texts or not results:
        yield Message.model_construct(role="user", content=_text(texts, "a user message"))


def _assistant_message(blocks: Sequence[PlacedBlock], call_ids: set[str]) -> Message:
    """Return the message of an assistant's turn, and add the ids of its calls to `call_ids`.

    Raises InvalidRequest for a block of a type that an assistant message cannot have, or without a required field.
    """
    types = ["text", "thinking", "redacted_thinking", "tool_use"]
    calls = []
    for each in blocks:
        each.check_type(types, "an assistant message")
        if each.block.type == "tool_use":
            arguments = json.dumps(each.get("input"), ensure_ascii=False)
            function = CalledFunction.model_construct(name=each.get("name"), arguments=arguments)
            calls.append(PastToolCall.model_construct(id=each.get("id"), function=function))
    call_ids.update(call.id for call in calls)
    thoughts = [each.get("thinking") for each in blocks if each.block.type == "thinking"]
    text = _text([each for each in blocks if each.block.type == "text"], "an assistant message")
    return Message.model_construct(
        role="assistant", content=text, tool_calls=calls or None, reasoning_content="\n".join(thoughts) or None
    )


def _chat_tool_choice(
    choice: MessagesToolChoice | None, *, has_tools: bool
) -> Literal["none", "auto", "required"] | NamedToolChoice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest.of("tool_choice.name", " is required with type tool")
        return NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    if choice.name is not None:
        raise InvalidRequest.of("tool_choice.name", f" is not allowed with type {choice.type}; leave it out")
    if choice.type == "any":
        if not has_tools:
            raise InvalidRequest.of("tool_choice", ": any needs tools; add tools")
        return "required"
    return choice.type


StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class ThinkingTokens(msgspec.Struct, kw_only=True):
    """Details of `output_tokens`. `thinking_tokens` counts the tokens of reasoning and of the tags around it."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts. Of the prompt, `cache_read_input_tokens` were in the prefix cache, and `input_tokens` were not.

    In `message_start`, `input_tokens` is the whole prompt, since the prefix cache has not been read yet.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class OutputBlock(msgspec.Struct, kw_only=True):
    """Block of a generated message.

    text: has `text`.
    thinking: has `thinking` and `signature`, which is empty.
    tool_use: has `id`, `name` and `input`.
    """

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class GeneratedMessage(msgspec.Struct, kw_only=True):
    """Response body of `/v1/messages`. `stop_sequence` is the stop sequence that ended the message, if any."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class BlockDelta(msgspec.Struct, kw_only=True):
    """Piece of a block in a stream, or in `message_delta` the reason for the message's end."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(msgspec.Struct, kw_only=True):
    """Event of a stream of `/v1/messages`. `type` is also the event's name, and says which fields are present."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: GeneratedMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: OutputBlock | UnsetType = UNSET
    delta: BlockDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class TokenCount(msgspec.Struct, kw_only=True):
    """Response body of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessagesErrorDetail(msgspec.Struct, kw_only=True):
    """Error of a request to `/v1/messages`. `details` has the error's code, which Anthropic's SDK reads."""

    type: str
    message: str
    details: dict[str, str]


class MessagesErrorBody(msgspec.Struct, kw_only=True):
    """Body of every error response of `/v1/messages`, and data of the event `error` of its stream."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None


# Types of errors by status. Other client errors are `invalid_request_error`, other failures `api_error`.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Chat completion fields that error messages name, and the names of the same fields in the Messages API.
_RENAMED = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "thinking_token_budget": "thinking.budget_tokens",
}


def is_messages_path(path: str) -> bool:
    """Return True for the path of a route whose errors have Anthropic's form."""
    return f"{path}/".startswith("/v1/messages/")


def messages_error(error: ApiError, request_id: str | None) -> MessagesErrorBody:
    """Return the body of an error response in Anthropic's form. Its message names the fields of the Messages API."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    message = error.message
    for name, new in _RENAMED.items():
        message = message.replace(name, new)
    kind, details = _ERROR_TYPES.get(error.status, default), {"error_code": error.code}
    detail = MessagesErrorDetail(type=kind, message=message, details=details)
    return MessagesErrorBody(error=detail, request_id=request_id)


def message_usage(usage: responses.Usage) -> MessageUsage:
    """Return a request's token counts in Anthropic's form, in which `input_tokens` excludes cached tokens."""
    details = usage.prompt_tokens_details
    cached = 0 if isinstance(details, UnsetType) else details.cached_tokens
    reasoning = usage.completion_tokens_details
    thinking: ThinkingTokens | UnsetType = UNSET
    if not isinstance(reasoning, UnsetType):
        thinking = ThinkingTokens(thinking_tokens=reasoning.reasoning_tokens)
    return MessageUsage(
        output_tokens_details=thinking,
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )
