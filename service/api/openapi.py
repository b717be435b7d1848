"""OpenAPI document (`/openapi.json`): all routes with their requests, responses and status codes.

The schemas come from the pydantic models that validate requests and from the structs that are encoded as responses.
Each error is documented by one example.
"""

import functools
import importlib.metadata
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.api import attention, openapi_examples
from service.http.middleware import ALWAYS_OPEN
from service.protocol import chat, chat_responses, completions, embeddings, errors, responses

_REF = "#/components/schemas/{name}"
_SCHEME = "apiKey"
_REFUSALS = (
    errors.InvalidRequest,
    errors.ModelNotFound,
    errors.BodyTooLarge,
    errors.RequestTimeout,
    errors.UnsupportedEncoding,
)
_FAILURES = (errors.Overloaded, errors.EngineFailed, errors.Draining)
_COMPUTATION = (*_REFUSALS, errors.ContextLengthExceeded, *_FAILURES)
_GENERATION = (*_COMPUTATION, errors.WaitTooLong, errors.QueueTimeout)
_KEPT = (*_GENERATION, errors.ResponseGone, errors.IdempotencyKeyReused)
_RESUME_HEADERS: list[dict[str, Any]] = [
    {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "A retry with the same key gets the response of the first attempt.",
        "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
    },
    {
        "name": "Last-Event-ID",
        "in": "header",
        "description": "Resumes a stream after the event with this id. Empty: the same as no header.",
        "schema": {"type": "string", "pattern": "^([0-9a-f]{32}/[0-9]{1,9})?$"},
    },
]
_TIMEOUT_HEADERS: list[dict[str, Any]] = [
    {
        "name": "x-request-timeout",
        "in": "header",
        "description": "Limit of the queue time in seconds, as timeout in the body. The shorter limit counts.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
]
_REQUEST_ID = {
    "description": "The request id: the client's, if valid, else one from the server",
    "schema": {"type": "string"},
}
_ERROR_HEADERS = {
    "retry-after": {"description": "Time after which to retry, in whole seconds", "schema": {"type": "string"}},
    "retry-after-ms": {"description": "Time after which to retry, in milliseconds", "schema": {"type": "string"}},
    "x-should-retry": {"description": "true if a retry can succeed, else false", "schema": {"enum": ["true", "false"]}},
    "www-authenticate": {"description": "Authentication scheme that the server expects", "schema": {"type": "string"}},
}
_REQUESTS: tuple[type[BaseModel], ...] = (
    completions.CompletionRequest,
    chat.ChatCompletionRequest,
    chat.TokenizeRequest,
    completions.DetokenizeRequest,
    attention.AttentionRequest,
    embeddings.EmbeddingRequest,
)
_ANSWERS = (
    responses.Completion,
    chat_responses.ChatCompletion,
    chat_responses.ChatCompletionChunk,
    responses.TokenizerInfo,
    responses.ModelCard,
    responses.ModelList,
    responses.Tokenized,
    responses.Detokenized,
    responses.Readiness,
    responses.Health,
    responses.Version,
    responses.ErrorBody,
    attention.Attention,
    attention.AttentionLimits,
    embeddings.EmbeddingList,
)


@functools.cache
def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of all routes."""
    _, requests = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=_REF_PYDANTIC)
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kvasir",
            "version": importlib.metadata.version("kvasir"),
            "description": "Completions and chat completions by a language model, in OpenAI's protocol.",
        },
        "paths": _with_common_responses(_paths()),
        "components": {
            "schemas": {**requests["$defs"], **answers},
            "securitySchemes": {
                _SCHEME: {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key, if the server requires one.",
                }
            },
        },
    }


_REF_PYDANTIC = _REF.replace("{name}", "{model}")


def _paths() -> dict[str, Any]:
    completion = _json(responses.Completion)
    stream = _stream(responses.Completion)
    conversation = _json(chat_responses.ChatCompletion) | _stream(chat_responses.ChatCompletionChunk)
    text = {"text/plain": {"schema": {"type": "string"}}}
    page = {"text/html": {"schema": {"type": "string"}}}
    model_id = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/completions": _post("Complete a prompt", completions.CompletionRequest, completion | stream, _KEPT),
        "/v1/chat/completions": _post("Complete a conversation", chat.ChatCompletionRequest, conversation, _KEPT),
        "/v1/embeddings": _post(
            "Compute embeddings of texts",
            embeddings.EmbeddingRequest,
            _json(embeddings.EmbeddingList),
            _KEPT,
        ),
        "/v1/models": _get("List the models", _json(responses.ModelList)),
        "/v1/models/{model_id}": _get(
            "Describe a model", _json(responses.ModelCard), (errors.ModelNotFound,), parameters=[model_id]
        ),
        "/tokenize": _post(
            "Convert a text or a conversation to token ids",
            chat.TokenizeRequest,
            _json(responses.Tokenized),
            (*_REFUSALS, errors.EngineFailed),
        ),
        "/tokenizer_info": _get("Get the special tokens and the chat template", _json(responses.TokenizerInfo)),
        "/detokenize": _post(
            "Convert token ids to text", completions.DetokenizeRequest, _json(responses.Detokenized), _REFUSALS
        ),
        "/inspect/attention": {
            **_get(
                "Get the limits of attention inspection", _json(attention.AttentionLimits), (attention.RouteDisabled,)
            ),
            **_post(
                "Compute the attention weights of a prompt in one layer",
                attention.AttentionRequest,
                _json(attention.Attention),
                (*_COMPUTATION, attention.RouteDisabled, errors.QueueTimeout),
            ),
        },
        "/health": _get("Check that the process is alive", _json(responses.Health)),
        "/ready": _get("Check that a request would be served now", _json(responses.Readiness), not_ready=True),
        "/version": _get("Get the version", _json(responses.Version)),
        "/metrics": _get("Get metrics for Prometheus", text),
        "/openapi.json": _get("Get this document", {"application/json": {"schema": {"type": "object"}}}),
        "/playground": _get("Get a page to try the model", page),
        "/": _get("Get the playground", page),
    }


def _with_common_responses(paths: dict[str, Any]) -> dict[str, Any]:
    """Add to each route the errors common to all: server error, oversized head, and missing key on guarded routes.

    Also adds the request id header to each response, and a HEAD operation to each GET.
    """
    for path, operations in paths.items():
        is_guarded = path not in ALWAYS_OPEN
        around = (errors.ApiError, errors.HeadTooLarge, *([errors.Unauthorized] if is_guarded else []))
        for operation in operations.values():
            answers = _errors((*operation.pop("refusals"), *around)) | operation["responses"]
            operation["responses"] = dict(sorted(answers.items()))
            for answer in operation["responses"].values():
                answer["headers"] = {"x-request-id": _REQUEST_ID, **answer.get("headers", {})}
            if is_guarded:  # the empty requirement: a server without keys
                operation["security"] = [{_SCHEME: []}, {}]
        if "get" in operations:
            operations["head"] = _head_operation(operations["get"])
    return paths


def _head_operation(operation: dict[str, Any]) -> dict[str, Any]:
    """Return a GET operation as HEAD: the same responses without content."""
    answers = operation["responses"].items()
    return operation | {"responses": {status: {**answer, "content": {}} for status, answer in answers}}


def _get(
    summary: str,
    content: dict[str, Any],
    refusals: tuple[type[errors.ApiError], ...] = (),
    *,
    parameters: list[dict[str, Any]] | None = None,
    not_ready: bool = False,
) -> dict[str, Any]:
    answers: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    if not_ready:
        headers = {"retry-after": _ERROR_HEADERS["retry-after"]}
        answers["503"] = {"description": "Not ready", "headers": headers, "content": content}
    return {"get": {"summary": summary, "parameters": parameters or [], "refusals": refusals, "responses": answers}}


def _post(
    summary: str, body: type[BaseModel], content: dict[str, Any], refusals: tuple[type[errors.ApiError], ...]
) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name=body.__name__)}
    taken = {"application/json": {"schema": schema, "examples": openapi_examples.of_request(body)}}
    return {
        "post": {
            "summary": summary,
            "parameters": [
                *(_RESUME_HEADERS if refusals is _KEPT else ()),
                *(_TIMEOUT_HEADERS if errors.QueueTimeout in refusals else ()),
            ],
            "requestBody": {"required": True, "content": taken},
            "refusals": refusals,
            "responses": {"200": {"description": "OK", "content": content}},
        }
    }


def _errors(kinds: tuple[type[errors.ApiError], ...]) -> dict[str, Any]:
    """Return the error responses by status. Errors with the same status share one response."""
    by_status: dict[str, list[errors.ApiError]] = {}
    for kind in kinds:
        by_status.setdefault(str(kind.status), []).append(openapi_examples.ERRORS[kind])
    return {
        status: {
            "description": " or ".join(f"`{error.code}`" for error in alike),
            "headers": {
                name: _ERROR_HEADERS[name] for error in alike for name in error.headers() if name in _ERROR_HEADERS
            },
            "content": {
                "application/json": {
                    "schema": {"$ref": _REF.format(name=responses.ErrorBody.__name__)},
                    "examples": {str(error.code): {"value": error.body()} for error in alike},
                }
            },
        }
        for status, alike in by_status.items()
    }


def _stream(event: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the content of an event stream. The schema describes one event: OpenAPI before 3.2 has no streams."""
    data = [{"$ref": _REF.format(name=name)} for name in (event.__name__, responses.ErrorBody.__name__)]
    schema = {
        "description": "one event of the stream; the last one is [DONE]",
        "type": "object",
        "required": ["data"],
        "properties": {
            "data": {
                "type": "string",
                "anyOf": [
                    {"const": "[DONE]"},
                    {"contentMediaType": "application/json", "contentSchema": {"anyOf": data}},
                ],
            }
        },
    }
    return {"text/event-stream": {"schema": schema, "examples": openapi_examples.of_stream(event)}}


def _json(answer: type[msgspec.Struct]) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name=answer.__name__)}
    return {"application/json": {"schema": schema, "examples": openapi_examples.of_answer(answer)}}
