"""Response bodies for completions, chat, tokens, models, server state and errors, also for `/openapi.json`."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType


class Logprobs(msgspec.Struct, kw_only=True):
    """Logprobs of a choice: four lists of equal length, one entry per token.

    `text_offset` is the number of characters of the choice's text before the token. A token that is not whole
    characters is shown as `bytes:\\xNN`. `top_logprobs` always includes the token itself. The first token of a prompt
    has no logprob and no top logprobs. With `return_tokens_as_token_ids` every token is shown as `token_id:N`.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, kw_only=True):
    """Logprob of a token at one prompt position. `rank` 1 is the most likely token; equal logprobs share a rank."""

    logprob: float
    rank: int
    decoded_token: str


# Per prompt token: the token itself, then the most likely tokens, by token id. None for the first token.
PromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """Completion, or one chunk of it in a stream. `stop_reason` is the matched stop string or token id, if any.

    `token_ids` and `prompt_token_ids` are sent with `return_token_ids`. In a stream, fields of the prompt are sent in
    the first chunk of each choice.
    """

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Details of `prompt_tokens`. `cached_tokens` counts the prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """Details of `completion_tokens`. `reasoning_tokens` counts the tokens of reasoning and of the tags around it."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of a request. Each prompt counts once, for any `n`. Details come with the final counts only."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Timings(msgspec.Struct, kw_only=True):
    """Times of the request. `queue_ms` and `prefill_ms` are of the choice with the earliest first token.

    `ttft_ms`: from the request's arrival to the first token; null without tokens. `decode_ms`: the longest time from
    first to last token of a choice. `tokens_per_second`: tokens of all choices after each choice's first, per second of
    `decode_ms`; null if `decode_ms` is 0.
    """

    queue_ms: float
    prefill_ms: float
    ttft_ms: float | None
    decode_ms: float
    tokens_per_second: float | None


class Completion(msgspec.Struct, kw_only=True):
    """Response body of `/v1/completions`, or one event of its stream.

    `timings` are in the body, in the event that ends the last choice, and in the usage event after it.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class ChatTopLogprob(msgspec.Struct, kw_only=True):
    """One of the most likely tokens at a position. `bytes`: the token's bytes in the text; null for a special token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatTopLogprob, kw_only=True):
    """Logprob of one token of a chat completion, and the most likely tokens at its position."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of a chat completion, one entry per sampled token, even if a stop string cuts the token's text."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """Function of a tool call. `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """Tool call of the model."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionDelta(msgspec.Struct, kw_only=True):
    """Part of a tool call's function in a stream: first the name, then pieces of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """Part of a tool call in a stream. The first part of a call has `id`, `type` and the function's name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatMessage(msgspec.Struct, kw_only=True):
    """Generated message, in the role of the assistant. `content` is null if the message has only tool calls.

    `reasoning_content` and `reasoning` are two names of the same text, which models that reason write first.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One completion of a conversation. `stop_reason`: the stop string or stop token id that ended it, if any."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Response body of `/v1/chat/completions` without streaming."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """Part of a message in one event of a stream: first the role, then text, reasoning or calls. It may be empty."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """Part of one chat completion in one event of a stream."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """Event of a chat stream. `timings` are in the event that ends the last choice, and in the usage event after it.

    If requested, the first event of the stream has the prompt's token ids. If requested, the first event of choice 0
    has the prompt's logprobs.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """Model that this server serves, an alias of it, or a LoRA adapter, whose `parent` is the model.

    created: seconds since 1970.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """Response of `/v1/models`: the served model, its aliases and its LoRA adapters."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(msgspec.Struct, kw_only=True):
    """Response of `/tokenize`. `tokens` are `count` token ids; `token_strs` are their texts, null if not requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class RenderedPrompt(msgspec.Struct, kw_only=True):
    """Token ids and parameters that a request gives to the engine for one prompt, in the shape of vLLM's `/render`.

    `sampling_params.seed` is null if each completion gets a random seed.
    """

    request_id: str
    token_ids: tuple[int, ...]
    model: str
    sampling_params: dict[str, Any]


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Response of `/tokenizer_info`: texts of special tokens, and the Jinja chat template. Null: the model has none."""

    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    chat_template: str | None


class Detokenized(msgspec.Struct, kw_only=True):
    """Response of `/detokenize`. `prompt` is the text, in which special tokens stand by name."""

    prompt: str


class Readiness(msgspec.Struct, kw_only=True):
    """Response of `/ready`. `elapsed_s`: seconds in this state; `ready` and `loading` count from the worker's start.

    `eta_s`: expected seconds until the server is ready, or until a drain ends; null if unknown.

    `level` (instruction set of the native kernels), `attention` (backend) and `dtype` are of the running worker
    process, null without one. `level` is also null if the worker computes with PyTorch's kernels. `fallbacks` names the
    faster paths that the worker had to do without, each with the reason.

    `devices` is the number of workers (--devices), and `devices_ready` the number of workers that take requests.
    """

    state: Literal["ready", "loading", "draining", "stalled"]
    phase: str
    elapsed_s: float
    eta_s: float | None
    level: str | None = None
    attention: str | None = None
    dtype: str | None = None
    fallbacks: tuple[str, ...] = ()
    devices: int
    devices_ready: int


class Health(msgspec.Struct, kw_only=True):
    """Response of `/health`, sent as long as the API process is alive."""

    status: Literal["ok"] = "ok"


class Version(msgspec.Struct, kw_only=True):
    """Response of `/version`: the version of the server."""

    version: str


class ServerInfo(msgspec.Struct, kw_only=True):
    """Response of `/server_info`, from which sglang-router learns the name of the model."""

    served_model_name: str
    version: str


class ErrorDetail(msgspec.Struct, kw_only=True):
    """Error of a request. `param` is the request field or header that caused the error, null if no single one did."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    """Body of an error response, except on `/v1/messages`, which has Anthropic's form."""

    error: ErrorDetail


encode = msgspec.json.Encoder().encode  # encodes a value as JSON


def encode_named_event(event: Any) -> bytes:
    """Encode a server-sent event, with the `type` of its data as its name."""
    return encode_event(event, b"event: %b\ndata: " % event.type.encode())


def encode_event(value: Any, before: bytes = b"data: ", after: bytes = b"\n\n") -> bytes:
    """Encode a value as a server-sent event: JSON between the bytes `before` and `after`.

    U+0085, U+2028 and U+2029 are escaped. Clients that split lines with Python's `str.splitlines` (httpx `iter_lines`)
    take these characters for line breaks.
    """
    data = encode(value)
    if not data.isascii():
        for raw, escaped in _LINE_BREAKS:
            data = data.replace(raw, escaped)
    return before + data + after


KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_LINE_BREAKS = [(c.encode(), b"\\u%04x" % ord(c)) for c in ("\x85", "\u2028", "\u2029")]
