"""Examples for `/openapi.json`: requests that any model can serve, and encoded responses and errors.

The examples of a request are a mapping of names to bodies.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from service.api import attention
from service.ipc.serving_path import ServingPath
from service.protocol import chat, chat_responses, completions, embeddings, errors, responses

_MODEL = "demo"
_CREATED = 1767225600  # 2026-01-01
_PROMPT = "Once upon a time"
_MESSAGES = [{"role": "user", "content": "Tell me a story."}]
_QUEUE_FULL = "the queue is full; try again later"
_SAMPLING = {"max_tokens": 8, "temperature": 0}

REQUESTS: Final[Mapping[type[BaseModel], Mapping[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        completions.CompletionRequest: {
            "greedy": {"prompt": _PROMPT, **_SAMPLING},
            "sampled": {"prompt": [_PROMPT, "The dog"], "n": 2, "seed": 1, "top_p": 0.9, "stop": ["\n\n"]},
            "streamed": {"prompt": _PROMPT, **_SAMPLING, "stream": True, "stream_options": {"include_usage": True}},
            "scored": {"prompt": _PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1},
        },
        chat.ChatCompletionRequest: {
            "greedy": {"messages": _MESSAGES, **_SAMPLING},
            "streamed": {"messages": _MESSAGES, **_SAMPLING, "stream": True},
        },
        embeddings.EmbeddingRequest: {
            "texts": {"input": [_PROMPT, "The dog"]},
            "short": {"input": _PROMPT, "dimensions": 16, "encoding_format": "base64"},
        },
        chat.TokenizeRequest: {
            "text": {"prompt": _PROMPT, "return_token_strs": True},
            "conversation": {"messages": _MESSAGES},
        },
        completions.DetokenizeRequest: {"text": {"tokens": [104, 105]}},
        attention.AttentionRequest: {"a head": {"prompt": "The dog", "layer": 0, "head": 0}},
    }
)

_USAGE = responses.Usage(
    prompt_tokens=5,
    completion_tokens=3,
    total_tokens=8,
    prompt_tokens_details=responses.PromptTokensDetails(cached_tokens=0),
)
_TIMINGS = responses.Timings(queue_ms=0.2, prefill_ms=9.1, ttft_ms=9.6, decode_ms=8.4, tokens_per_second=238.1)
_CARD = responses.ModelCard(id=_MODEL, created=_CREATED, owned_by="kvasir", max_model_len=512)

_ANSWERS: Final[Sequence[msgspec.Struct]] = (
    responses.Completion(
        id="cmpl-1f8b",
        created=_CREATED,
        model=_MODEL,
        choices=[
            responses.CompletionChoice(
                index=0, text=" there was a", logprobs=None, finish_reason="length", stop_reason=None
            )
        ],
        usage=_USAGE,
        timings=_TIMINGS,
    ),
    chat_responses.ChatCompletion(
        id="chatcmpl-1f8b",
        created=_CREATED,
        model=_MODEL,
        choices=[
            chat_responses.ChatChoice(
                index=0,
                message=chat_responses.ChatMessage(content="Once there was"),
                logprobs=None,
                finish_reason="length",
                stop_reason=None,
            )
        ],
        usage=_USAGE,
        timings=_TIMINGS,
    ),
    chat_responses.ChatCompletionChunk(
        id="chatcmpl-1f8b",
        created=_CREATED,
        model=_MODEL,
        choices=[
            chat_responses.ChatChunkChoice(
                index=0, delta=chat_responses.ChatDelta(content=" was"), finish_reason="length"
            )
        ],
        timings=_TIMINGS,
    ),
    embeddings.EmbeddingList(
        data=[embeddings.Embedding(index=0, embedding=[0.6, -0.8])],
        model=_MODEL,
        usage=embeddings.EmbeddingUsage(prompt_tokens=2, total_tokens=2),
    ),
    _CARD,
    responses.ModelList(data=[_CARD]),
    responses.Tokenized(count=2, max_model_len=512, tokens=[389, 581], token_strs=["The", " dog"]),
    responses.Detokenized(prompt="The dog"),
    responses.TokenizerInfo(eos_token="<|endoftext|>", bos_token=None, pad_token=None, chat_template=None),
    responses.Readiness(
        state="ready",
        phase="serving",
        elapsed_s=12.3,
        eta_s=0.0,
        path=ServingPath(
            kernels="own", level="avx512bf16fma", attention="native", matrices="packed", dtype="float32", device="cpu"
        ),
    ),
    responses.Health(),
    responses.Version(version="0.1.0"),
    attention.Attention(
        model=_MODEL,
        layer=0,
        heads=[0],
        num_layers=6,
        num_heads=8,
        token_ids=[389, 581],
        tokens=["The", " dog"],
        weights=[[[1.0, 0.0], [0.25, 0.75]]],
        timings=attention.LookTimings(total_ms=9.4, compute_ms=7.3),
    ),
    attention.AttentionLimits(model=_MODEL, num_layers=6, num_heads=8, max_tokens=128),
)
ANSWERS: Final[Mapping[type[msgspec.Struct], msgspec.Struct]] = MappingProxyType(
    {type(answer): answer for answer in _ANSWERS}
)

# One example of each error in the document. The documented headers are read from the examples.
_ERRORS: Final[Sequence[errors.ApiError]] = (
    errors.ApiError("internal error"),
    errors.InvalidRequest("temperature must be less than or equal to 2", param="temperature"),
    errors.ContextLengthExceeded(
        "the context is 512 tokens, but the prompt has 500 and max_tokens is 16", param="max_tokens"
    ),
    errors.IdempotencyKeyReused("the Idempotency-Key belongs to another request; use a new one"),
    errors.ResponseGone(
        "the events after Last-Event-ID are no longer stored; repeat the request without Last-Event-ID"
    ),
    errors.HeadTooLarge("the head of the request is too large"),
    errors.RequestTimeout("the request's body took too long to arrive; send it again"),
    errors.UnsupportedEncoding("Content-Encoding 'gzip' is not supported; send the body uncompressed"),
    errors.Unauthorized("no API key was sent"),
    errors.ModelNotFound("the model 'unknown' does not exist", param="model"),
    errors.BodyTooLarge("the body is over the limit of 2097152 bytes"),
    errors.Overloaded(_QUEUE_FULL, retry_after_seconds=1.5),
    errors.WaitTooLong(
        "the request would wait about 2.1 s, longer than 0.5 s; try again later, or set a larger timeout",
        retry_after_seconds=1.6,
    ),
    errors.QueueTimeout("the request was not begun within its time, 60 s; try again later", retry_after_seconds=1.0),
    errors.EngineFailed("the engine failed on this request", retry=True),
    errors.Draining("the server is shutting down", retry_after_seconds=1.0),
    attention.RouteDisabled(
        "attention inspection is switched off on this server; start it with --max-inspect-tokens above 0"
    ),
)
ERRORS: Final[Mapping[type[errors.ApiError], errors.ApiError]] = MappingProxyType(
    {type(error): error for error in _ERRORS}
)


def of_request(model: type[BaseModel]) -> dict[str, Any]:
    """Return the `examples` of a request body."""
    return {name: {"value": dict(body)} for name, body in REQUESTS.get(model, {}).items()}


def of_answer(answer: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the `examples` of a JSON response."""
    return {"answer": {"value": msgspec.to_builtins(ANSWERS[answer])}} if answer in ANSWERS else {}


def of_stream(event: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the `examples` of an event stream: its last two events."""
    data = {"answer": responses.encode(ANSWERS[event]).decode(), "end": "[DONE]"}
    return {name: {"value": {"data": value}} for name, value in data.items()}
