"""Response bodies of all routes except embeddings and attention. `/openapi.json` documents these structs."""

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
    """Completion, or one chunk of a completion in a stream. `stop_reason` is the stop string or token id that matched.

    `token_ids` and `prompt_token_ids` are sent with `return_token_ids`. In a stream, fields of the prompt are sent in
    the first chunk.
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
    """Details of the prompt's tokens. `cached_tokens` counts the prompt tokens found in the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts. Each prompt counts once, for any number of samples. Details are sent at the end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class Timings(msgspec.Struct, kw_only=True):
    """Time spent on the request: the choice that started first; for `decode_ms`, the slowest choice.

    `ttft_ms` counts from arrival. `tokens_per_second` counts from the first token. Both are null if there was no token.
    """

    queue_ms: float
    prefill_ms: float
    ttft_ms: float | None
    decode_ms: float
    tokens_per_second: float | None


class Completion(msgspec.Struct, kw_only=True):
    """Body of completions, or one event of a stream. `timings` are in the body and in the last two events."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class ChatTopLogprob(msgspec.Struct, kw_only=True):
    """Alternative token of a chat completion. `bytes`: the token's bytes of the text; null for a special token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatTopLogprob, kw_only=True):
    """Token of a chat completion, with the most likely alternatives. The joined bytes of all tokens are the text."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of a chat completion, one entry per token. Tokens of a stop string have entries, but no text."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """Message of the assistant."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One completion of a conversation. `stop_reason`: the stop string or token id that matched."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Body of a chat completion without streaming."""

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
    """New part of a message in a stream: the role first, then text. The last delta may be empty."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """New part of one chat completion in a stream."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """Event of a chat stream. The last choice's final event and the usage event after it have `timings`.

    Fields of the prompt are in the event that begins the first choice.
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
    """Model that this server serves."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """List of the served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(msgspec.Struct, kw_only=True):
    """Response of `/tokenize`. `token_strs` is null unless requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Texts of the special tokens, and the Jinja chat template. Each is null if the model has none."""

    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    chat_template: str | None


class Detokenized(msgspec.Struct, kw_only=True):
    """Response of `/detokenize`: the text, with special tokens by name."""

    prompt: str


class Readiness(msgspec.Struct, kw_only=True):
    """Readiness of the server. `eta_s` is null if unknown.

    `level`, `attention` and `dtype` are null while no worker is up. `level` is the instruction set of the native
    kernels, null if PyTorch's kernels compute.
    """

    state: Literal["ready", "loading", "draining", "stalled"]
    phase: str
    elapsed_s: float
    eta_s: float | None
    level: str | None = None
    attention: str | None = None
    dtype: str | None = None


class Health(msgspec.Struct, kw_only=True):
    """Liveness of the API process."""

    status: Literal["ok"] = "ok"


class Version(msgspec.Struct, kw_only=True):
    """Version of the server."""

    version: str


class ErrorDetail(msgspec.Struct, kw_only=True):
    """Error message, type and code. `param` is the field of the request that caused the error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    """Body of every error response."""

    error: ErrorDetail


encode = msgspec.json.Encoder().encode  # encodes a value as JSON


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
