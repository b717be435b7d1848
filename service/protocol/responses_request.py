"""Request body of `/v1/responses`, OpenAI's Responses API, and its conversion to a chat completion request."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from service.config.validation_messages import reword
from service.protocol.chat import MAX_PARTS, ChatCompletionRequest, Effort, Message, TemplateVariables
from service.protocol.completions import (
    MAX_STOPS,
    Count,
    NumLogprobs,
    SamplingRequest,
    StreamOptions,
)
from service.protocol.errors import ApiError, InvalidRequest
from service.protocol.request_model import IGNORED, MAX_MESSAGES, RequestModel, Unsupported
from service.protocol.response_format import JsonSchemaFormat, OutputConstraint, ResponseFormat, Schema
from service.protocol.tools import (
    MAX_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    CalledFunction,
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    PastToolCall,
    ToolDefinition,
    ToolName,
)

_LOGPROBS = "message.output_text.logprobs"
# Fields of the same name and meaning in a chat completion request.
_SAME_FIELDS = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "parallel_tool_calls", "user"),
    *("priority", "timeout", "cache_salt", "chat_template_kwargs", "thinking_token_budget"),
)
# Patterns of chat completion fields that errors name, and the names of the same fields in a response request.
_RENAMED = {
    r"response_format(\.json_schema)?": "text.format",
    "messages": "input",
    "max_(completion_)?tokens": "max_output_tokens",
    "truncate_prompt_tokens": "truncation",
}


def _only(remedy: str, *kinds: str) -> BeforeValidator:
    """Return a validator that rejects objects of a `type` not in `kinds`. Its error message ends with the remedy."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            message = "of type '{kind}' is not supported; " + remedy
            raise PydanticCustomError("kind", message, {"kind": kind[:100]})
        return value

    return BeforeValidator(check)


def _tag(value: Any) -> str:
    return "@list" if isinstance(value, list) else "@text"


class InputPart(RequestModel):
    """Text part of an input item. Parts of earlier output have empty `annotations`, and ignored `logprobs`."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


_PARTS = ("input_text", "output_text", "text")
_Part = Annotated[InputPart, _only("this server reads text only", *_PARTS)]
_Parts = Annotated[list[_Part], Field(max_length=MAX_PARTS, fail_fast=True)]
# Tags that begin with @ are left out of the names of fields in error messages.
Content = Annotated[Annotated[str, Tag("@text")] | Annotated[_Parts, Tag("@list")], Discriminator(_tag)]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


def text_of(content: str | Sequence[InputPart]) -> str:
    """Return the content of an item as one text. Parts are joined by newlines."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class _StoredItem(RequestModel):
    """Fields of all input items."""

    id: str | None = None
    status: Status | None = None

    def stored(self) -> dict[str, Any]:
        """Return this item as `GET /v1/responses/{id}/input_items` shows it, but without an id."""
        return self.model_dump(exclude_none=True, exclude={"id"})


class InputMessage(_StoredItem):
    """Message of the conversation. `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Annotated[Any, Unsupported()] = None

    def stored(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "input_text"}
        if self.role == "assistant":
            part = {"type": "output_text", "annotations": []}
        texts = [self.content] if isinstance(self.content, str) else [each.text for each in self.content]
        content = [{**part, "text": text} for text in texts]
        return {"type": "message", "role": self.role, "content": content, "status": self.status or "completed"}


class InputFunctionCall(_StoredItem):
    """Function call of an earlier response. `arguments` is the JSON text of an object."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: Annotated[Any, Unsupported()] = None
    caller: Annotated[Any, Unsupported()] = None

    def stored(self) -> dict[str, Any]:
        return {**super().stored(), "status": self.status or "completed"}


class InputFunctionOutput(_StoredItem):
    """Result of a function call, for the model."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    name: str | None = None
    namespace: Annotated[Any, Unsupported()] = None
    caller: Annotated[Any, Unsupported()] = None

    def stored(self) -> dict[str, Any]:
        status = self.status or "completed"
        return {"type": self.type, "call_id": self.call_id, "output": text_of(self.output), "status": status}


class ReasoningPart(RequestModel):
    """Part of a reasoning item: reasoning text, or text of a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(_StoredItem):
    """Reasoning of an earlier response. Chat templates that read reasoning get `content`, or `summary` without it."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None

    def stored(self) -> dict[str, Any]:
        return {"summary": [], **super().stored()}


InputItem: TypeAlias = InputMessage | InputFunctionCall | InputFunctionOutput | InputReasoning
_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_Item = Annotated[
    Annotated[InputMessage, Tag("@message")]
    | Annotated[InputFunctionCall, Tag("@function_call")]
    | Annotated[InputFunctionOutput, Tag("@function_call_output")]
    | Annotated[InputReasoning, Tag("@reasoning")],
    Discriminator(lambda value: f"@{value.get('type') or 'message'}" if isinstance(value, dict) else "@message"),
    _only("send messages, function calls, their outputs and reasoning", *_KINDS),
]
_Items = Annotated[list[_Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
_STORED_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[_Item])


def read_items(stored: list[dict[str, Any]]) -> list[InputItem]:
    """Parse stored input and output items (JSON objects), as if a request had sent them in its field `input`."""
    return _STORED_ITEMS.validate_python(stored)


class FunctionTool(FunctionDefinition):
    """Field `tools[]`: a function that the model may call."""

    type: Literal["function"]


class ChosenFunction(RequestModel):
    """Field `tool_choice` that demands a call of one function. It also names the functions of `allowed_tools`."""

    type: Literal["function"]
    name: ToolName


class ChosenFunctions(RequestModel):
    """Field `tool_choice` that allows some of the functions."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(min_length=1, max_length=MAX_TOOLS)]


class TextFormat(RequestModel):
    """Field `text.format`: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None
    description: str | None = None

    def response_format(self) -> ResponseFormat:
        """Return the format in the form of chat completions. Raises InvalidRequest for a missing name or schema."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        for name, value in (("name", self.name), ("schema", self.schema_)):
            if value is None:
                raise InvalidRequest.of(f"text.format.{name}", " is required with type json_schema")
        wanted = JsonSchemaFormat.model_construct(
            name=self.name, schema_=self.schema_, strict=self.strict, description=self.description
        )
        return ResponseFormat.model_construct(type=self.type, json_schema=wanted)


class TextOptions(RequestModel):
    """Field `text`. `verbosity` changes nothing."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(RequestModel):
    """Field `reasoning`. Reasoning is returned whole and never summarized, whatever `summary` says."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(RequestModel):
    """Field `stream_options`."""

    include_obfuscation: Annotated[Any, Unsupported(False)] = None


class ResponsesChat(ChatCompletionRequest):
    """Chat completion request made from a response request. Errors about its output format name `text.format`."""

    @property
    def output_constraint(self) -> OutputConstraint | None:
        try:
            found = super().output_constraint
        except InvalidRequest as error:
            rename_fields(error)
            raise
        return None if found is None else replace(found, param=_renamed(found.param))


class ResponsesRequest(SamplingRequest):
    """Body of `POST /v1/responses`."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    }
    UNION_ERRORS: ClassVar[Mapping[str, str]] = {
        "stop": f"must be a non-empty string, or a list of at most {MAX_STOPS} non-empty strings",
        "tool_choice": 'must be "none", "auto", "required", {"type": "function", "name": …} '
        'or {"type": "allowed_tools", "mode": …, "tools": […]}',
        "chat_template_kwargs": "must be true, false, a number, a string or null",
    }

    input: Annotated[Annotated[str, Tag("@text")] | Annotated[_Items, Tag("@list")], Discriminator(_tag)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = False
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    tools: (
        Annotated[
            list[Annotated[FunctionTool, _only("this server calls functions only", "function")]],
            Field(max_length=MAX_TOOLS),
        ]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | ChosenFunctions | None = None
    parallel_tool_calls: bool | None = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: NumLogprobs | None = None
    include: (
        Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(max_length=16)]
        | None
    ) = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Annotated[Any, Unsupported("auto", "default")] = None
    prompt_cache_retention: IGNORED = None
    prompt_cache_options: IGNORED = None
    access_programs: Annotated[Any, Unsupported()] = None
    background_options: Annotated[Any, Unsupported()] = None
    image: Annotated[Any, Unsupported()] = None
    conversation: Annotated[Any, Unsupported()] = None
    prompt: Annotated[Any, Unsupported()] = None
    context_management: Annotated[Any, Unsupported([])] = None
    moderation: Annotated[Any, Unsupported()] = None
    # Fields of chat completions that OpenAI's Responses API lacks, besides those of `SamplingRequest`.
    chat_template_kwargs: TemplateVariables | None = None
    thinking_token_budget: Count | None = None

    def check_fields(self) -> None:
        """Raise InvalidRequest if `background` is true, and `store` is false."""
        if self.background and self.store is False:
            raise InvalidRequest.of("background", " needs store: true; leave out store, or background")

    @property
    def items(self) -> Sequence[InputItem]:
        """Items of the field `input`. An input that is a string becomes one message of the user."""
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return self.input

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def chat(self, earlier: Sequence[InputItem]) -> ResponsesChat:
        """Return the chat completion request that generates the response. Raises InvalidRequest if it is invalid.

        Args:
            earlier: items before the input, from the response `previous_response_id`.
        """
        messages = _messages(earlier, self.items)
        if self.instructions is not None:
            messages.insert(0, _message(role="system", content=self.instructions))
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest.of("input", f" has over {MAX_MESSAGES} messages; shorten the conversation")
        fields = {name: getattr(self, name) for name in _SAME_FIELDS if name in self.model_fields_set}
        streams = bool(self.stream or self.background)
        wanted = None if self.text is None or self.text.format is None else self.text.format.response_format()
        chat = ResponsesChat.model_construct(
            **fields,
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.shows_logprobs,
            top_logprobs=self.top_logprobs,
            tools=[_tool(tool) for tool in self.tools or ()],
            tool_choice=self._tool_choice(),
            response_format=wanted,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            stream=streams,
            stream_options=StreamOptions(include_usage=True) if streams else None,
        )
        chat.check_fields()
        return chat

    def echo(self) -> dict[str, Any]:
        """Return the request's fields that the response repeats, except `store`, by name.

        Absent values become OpenAI's defaults, except that an absent `temperature` or `top_p` stays None.
        """
        text = {"format": {"type": "text"}, **_dumped(self.text)}
        tools = [tool.model_dump() for tool in self.tools or ()]
        return {
            "background": bool(self.background),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **_dumped(self.reasoning)},
            "safety_identifier": self.safety_identifier,
            "temperature": self.temperature,
            "text": text,
            "tool_choice": "auto" if self.tool_choice is None else _dumped(self.tool_choice),
            "tools": tools,
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }

    def _tool_choice(self) -> Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None:
        match self.tool_choice:
            case ChosenFunction():
                return _named(self.tool_choice)
            case ChosenFunctions():
                names = [_named(tool) for tool in self.tool_choice.tools]
                allowed = AllowedTools(mode=self.tool_choice.mode, tools=names)
                return AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
            case _:
                return self.tool_choice

    @classmethod
    def _explain(cls, error: ValidationError, body: bytes) -> InvalidRequest:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        kind, loc = first["type"], first["loc"]
        place = [part for part in loc if not str(part).startswith("@")]
        if not place or (kind == "missing" and len(place) == 1):
            return super()._explain(error, body)
        field = str(place[0])
        if field in cls.UNION_ERRORS and len(place) > 1:
            return InvalidRequest.of(field, f" {cls.UNION_ERRORS[field]}")
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{str(part)[:100]}" for part in place)[1:]
        problem = "is required" if kind == "missing" else reword(kind, first["msg"])
        if kind == "union_tag_invalid":
            problem = "has an unknown type; send messages, function_call, function_call_output or reasoning items"
        if loc[-1] == "@text":
            problem = "must be a string or a list"
        return InvalidRequest.of(name, f" {problem}")


def _messages(earlier: Sequence[InputItem], items: Sequence[InputItem]) -> list[Message]:
    """Return the messages of a conversation: those of `earlier`, then those of `items`.

    Consecutive reasoning, text and calls are one assistant message. Reasoning, or text after text, begins the next.

    Raises InvalidRequest for a function's output without an earlier call, or for invalid arguments of a call.
    """
    messages: list[dict[str, Any]] = []
    call_ids: set[str] = set()
    for number, item in enumerate([*earlier, *items], -len(earlier)):
        if isinstance(item, InputFunctionOutput):
            if item.call_id not in call_ids:
                param = f"input[{number}].call_id"
                raise InvalidRequest.of(
                    param, " names no function call of an earlier item; send the call before its output"
                )
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
            continue
        if isinstance(item, InputMessage) and item.role != "assistant":
            messages.append({"role": item.role, "content": text_of(item.content)})
            continue
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
        is_next = isinstance(item, InputReasoning) or (isinstance(item, InputMessage) and "content" in last)
        if is_next or not last:
            messages.append(last := {"role": "assistant"})
        match item:
            case InputReasoning():
                last["reasoning_content"] = "\n".join(part.text for part in item.content or item.summary or ())
            case InputMessage():
                last["content"] = text_of(item.content)
            case InputFunctionCall():
                call_ids.add(item.call_id)
                last.setdefault("tool_calls", []).append(_call(item, number))
    return [_message(**message) for message in messages]


def _message(**fields: Any) -> Message:
    return Message.model_construct(**fields)


def _call(item: InputFunctionCall, number: int) -> PastToolCall:
    """Return a function call among the input items in the form of chat completions.

    Raises InvalidRequest if its arguments are not a JSON object.
    """
    function = CalledFunction(name=item.name, arguments=item.arguments)
    if function.parsed_arguments() is None:
        param = f"input[{number}].arguments"
        raise InvalidRequest.of(param, " must be a JSON object as text, with at most 20,000 lists and objects")
    return PastToolCall(id=item.call_id, function=function)


def _tool(tool: FunctionTool) -> ToolDefinition:
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return ToolDefinition(type="function", function=function)


def _named(function: ChosenFunction) -> NamedToolChoice:
    return NamedToolChoice(type="function", function=NamedFunction(name=function.name))


def _dumped(value: RequestModel | str | None) -> Any:
    """Return the value of a request field as a JSON value without null members; {} for None."""
    return value.model_dump(by_alias=True, exclude_none=True) if isinstance(value, RequestModel) else value or {}


def _renamed(text: str) -> str:
    for pattern, name in _RENAMED.items():
        text = re.sub(rf"\b{pattern}\b", name, text)
    return text


def rename_fields(error: ApiError) -> None:
    """Change an error of a chat completion request, in place, to name the fields of the response request."""
    if error.param is not None and (param := _renamed(error.param)) != error.param:
        error.param, error.message = param, _renamed(error.message)
