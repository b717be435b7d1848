"""Response bodies and stream events of `/v1/responses`, OpenAI's Responses API."""

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from service.protocol.errors import ApiError, InvalidRequest, RetryLater
from service.protocol.responses import ChatTokenLogprob, Timings, Usage

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
ResponseStatus: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message. `logprobs` has one entry per token of the text if logprobs are requested, else it is empty."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of a reasoning item."""

    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """Output item of `/v1/responses`: message of the assistant."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Output item of `/v1/responses`: reasoning, before the message and calls. `summary` is always empty."""

    id: str
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


class OutputFunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """Output item of `/v1/responses`: function call. `arguments` is JSON text. The call's result names `call_id`."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem: TypeAlias = OutputMessage | OutputReasoning | OutputFunctionCall


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """Details of `input_tokens`. `cached_tokens` counts the input tokens found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """Details of `output_tokens`. `reasoning_tokens` counts the tokens of reasoning and of the tags around it."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, kw_only=True):
    """Error that ended a response of `/v1/responses`.

    `code`: one of OpenAI's codes for this field, which error responses do not use.
    """

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Reason of the status `incomplete`: `max_output_tokens`, or the length of the context, was reached."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ModelResponse(msgspec.Struct, kw_only=True):
    """Response of `/v1/responses`. Fields after `timings` repeat the request.

    `usage` and `timings` are null unless the status is `completed` or `incomplete`.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    timings: Timings | None = None
    store: bool
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    user: str | None


class ModelResponseEvent(msgspec.Struct, kw_only=True):
    """Event of a stream of `/v1/responses`. `type` is also the event's name, and says which fields are present."""

    type: str
    response: ModelResponse | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
    delta: str | UnsetType = UNSET
    sequence_number: int  # `ResponsesBuilder` cuts an encoded event before `delta`, so these two fields come last


class DeletedResponse(msgspec.Struct, kw_only=True):
    """Response of `DELETE /v1/responses/{response_id}`."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct, kw_only=True):
    """Response of `GET /v1/responses/{response_id}/input_items`: a page of the items that the response answers."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def response_usage(usage: Usage) -> ResponseUsage:
    """Return the final token counts of a chat completion in the form of the Responses API."""
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=0 if prompt is UNSET else prompt.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=0 if completion is UNSET else completion.reasoning_tokens
        ),
        total_tokens=usage.total_tokens,
    )


def response_failure(error: ApiError) -> ResponseFailure:
    """Return an error in the form of a response's field `error`, which has one of only three codes."""
    if isinstance(error, InvalidRequest):
        return ResponseFailure(code="invalid_prompt", message=error.message)
    code: Literal["rate_limit_exceeded", "server_error"] = (
        "rate_limit_exceeded" if isinstance(error, RetryLater) else "server_error"
    )
    return ResponseFailure(code=code, message=error.message)
