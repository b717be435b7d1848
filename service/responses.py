"""The OpenAI wire contract of answers. What is encoded is what `/openapi.json` documents: one definition."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from service.serving_path import ServingPath


class Logprobs(msgspec.Struct, kw_only=True):
    """Four lists of equal length, one entry a token.

    `text_offset`: characters of the choice's text before the token. A token that is not whole characters is shown
    as `bytes:\\xNN`. `top_logprobs` always has the token itself. The first token of a prompt has neither logprob.
    With `return_tokens_as_token_ids` every token is shown as `token_id:N`.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, kw_only=True):
    """A token where a prompt has it, or might have it. `rank`: 1 for the most likely one; equals share one."""

    logprob: float
    rank: int
    decoded_token: str


# For each token of a prompt: itself, then the most likely ones, by id. The first one has nothing before it.
PromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A completion, or in a stream a piece of one. `stop_reason`: the stop string or token id that matched.

    `token_ids` and `prompt_token_ids` come with `return_token_ids`; what is the prompt's comes in the first piece.
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
    """`cached_tokens`: prompt tokens whose KV-cache was already there."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Each prompt counts once, however many samples are drawn from it. Details are known at the end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class Timings(msgspec.Struct, kw_only=True):
    """Where the time went. With several choices: of the one that began first; `decode_ms` of the slowest.

    `ttft_ms` counts from arrival, `tokens_per_second` from the first token on; both null where there was none.
    """

    queue_ms: float
    prefill_ms: float
    ttft_ms: float | None
    decode_ms: float
    tokens_per_second: float | None


class Completion(msgspec.Struct, kw_only=True):
    """The answer as one body, or one event of a stream. `timings` come in the body and in the last two events."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that can be asked for."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """The models that can be asked for."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(msgspec.Struct, kw_only=True):
    """`token_strs` where they were asked for, else null."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The marks' texts, and the Jinja template of conversations; null for what the model has not."""

    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    chat_template: str | None


class Detokenized(msgspec.Struct, kw_only=True):
    """Text, special tokens by name."""

    prompt: str


class Readiness(msgspec.Struct, kw_only=True):
    """`state` is ready, loading, draining or stalled; `eta_s` is null where nobody knows, `path` where none serves."""

    state: Literal["ready", "loading", "draining", "stalled"]
    phase: str
    elapsed_s: float
    eta_s: float | None
    path: ServingPath | None = None


class Health(msgspec.Struct, kw_only=True):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Version(msgspec.Struct, kw_only=True):
    """What runs."""

    version: str


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    """Every error has this shape."""

    error: ErrorDetail


def encode(value: Any) -> bytes:
    """JSON."""
    return _ENCODER.encode(value)


def encode_event(value: Any) -> bytes:
    """A server-sent event with JSON as its data.

    JSON has no line breaks, but three characters that Unicode counts among them, and so do clients that split with
    Python's `str.splitlines` (httpx's `iter_lines`): those are escaped.
    """
    return b"data: " + encode_text(value) + b"\n\n"


def encode_text(value: Any) -> bytes:
    """JSON as it stands in an event."""
    data = _ENCODER.encode(value)
    if not data.isascii():
        for raw, escaped in _LINE_BREAKS:
            data = data.replace(raw, escaped)
    return data


KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_ENCODER = msgspec.json.Encoder()
_LINE_BREAKS = [(c.encode(), b"\\u%04x" % ord(c)) for c in ("\x85", "\u2028", "\u2029")]
