"""`/openapi.json`: the routes with what they take, what they answer, and every status they can end with.

Requests are documented by the pydantic models that check them, answers by the structs that are encoded, and errors
by one of each kind.
"""

import functools
import importlib.metadata
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service import (
    chat_responses,
    chat_schemas,
    embedding_schemas,
    errors,
    inspection,
    openapi_examples,
    responses,
    schemas,
)
from service.access import ALWAYS_OPEN

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
_KEPT = (*_GENERATION, errors.AnswerGone, errors.KeyReused)
_COME_BACK: list[dict[str, Any]] = [
    {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "A retry under the same key gets the answer of the first attempt.",
        "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
    },
    {
        "name": "Last-Event-ID",
        "in": "header",
        "description": "The id of a stream's last event that was seen: its later ones are the answer. Empty: none was.",
        "schema": {"type": "string", "pattern": "^([0-9a-f]{32}/[0-9]{1,9})?$"},
    },
]
_WAIT: list[dict[str, Any]] = [
    {
        "name": "x-request-timeout",
        "in": "header",
        "description": "As timeout in the body: seconds that it may wait for its turn. The shorter counts.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
]
_REQUEST_ID = {"description": "The request's own, if it had one that fits, else ours", "schema": {"type": "string"}}
_ERROR_HEADERS = {
    "retry-after": {"description": "When to come back, in whole seconds", "schema": {"type": "string"}},
    "retry-after-ms": {"description": "The same in milliseconds", "schema": {"type": "string"}},
    "x-should-retry": {"description": "Can another attempt help?", "schema": {"enum": ["true", "false"]}},
    "www-authenticate": {"description": "What kind of key is asked for", "schema": {"type": "string"}},
}
_REQUESTS: tuple[type[BaseModel], ...] = (
    schemas.CompletionRequest,
    chat_schemas.ChatCompletionRequest,
    chat_schemas.TokenizeRequest,
    schemas.DetokenizeRequest,
    inspection.AttentionRequest,
    embedding_schemas.EmbeddingRequest,
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
    inspection.Attention,
    inspection.AttentionLimits,
    embedding_schemas.EmbeddingList,
)


@functools.cache
def openapi_document() -> dict[str, Any]:
    """The OpenAPI 3.1 document of all routes."""
    _, requests = models_json_schema([(model, "validation") for model in _REQUESTS], ref_template=_REF_PYDANTIC)
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kvasir",
            "version": importlib.metadata.version("kvasir"),
            "description": "Completions and conversations by a language model, in OpenAI's protocol.",
        },
        "paths": _surrounded(_paths()),
        "components": {
            "schemas": {**requests["$defs"], **answers},
            "securitySchemes": {
                _SCHEME: {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key, where the server asks for one.",
                }
            },
        },
    }


_REF_PYDANTIC = _REF.replace("{name}", "{model}")


def _paths() -> dict[str, Any]:
    completion = _json(responses.Completion)
    stream = _stream(responses.Completion)
    chat = _json(chat_responses.ChatCompletion) | _stream(chat_responses.ChatCompletionChunk)
    text = {"text/plain": {"schema": {"type": "string"}}}
    page = {"text/html": {"schema": {"type": "string"}}}
    model_id = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/completions": _post("Complete a prompt", schemas.CompletionRequest, completion | stream, _KEPT),
        "/v1/chat/completions": _post("Answer a conversation", chat_schemas.ChatCompletionRequest, chat, _KEPT),
        "/v1/embeddings": _post(
            "Vectors of texts",
            embedding_schemas.EmbeddingRequest,
            _json(embedding_schemas.EmbeddingList),
            _KEPT,
        ),
        "/v1/models": _get("List the models", _json(responses.ModelList)),
        "/v1/models/{model_id}": _get(
            "Describe a model", _json(responses.ModelCard), (errors.ModelNotFound,), parameters=[model_id]
        ),
        "/tokenize": _post(
            "Text, or a conversation, to token ids",
            chat_schemas.TokenizeRequest,
            _json(responses.Tokenized),
            (*_REFUSALS, errors.EngineFailed),
        ),
        "/tokenizer_info": _get("The marks and the chat template", _json(responses.TokenizerInfo)),
        "/detokenize": _post("Token ids to text", schemas.DetokenizeRequest, _json(responses.Detokenized), _REFUSALS),
        "/inspect/attention": {
            **_get("What can be looked at", _json(inspection.AttentionLimits), (inspection.SwitchedOff,)),
            **_post(
                "What a prompt's tokens attend to in one layer",
                inspection.AttentionRequest,
                _json(inspection.Attention),
                (*_COMPUTATION, inspection.SwitchedOff, errors.QueueTimeout),
            ),
        },
        "/health": _get("Is the process alive?", _json(responses.Health)),
        "/ready": _get("Would a request be served now?", _json(responses.Readiness), not_ready=True),
        "/version": _get("The version", _json(responses.Version)),
        "/metrics": _get("Metrics for Prometheus", text),
        "/openapi.json": _get("This document", {"application/json": {"schema": {"type": "object"}}}),
        "/playground": _get("A page to try the model", page),
        "/": _get("The playground", page),
    }


def _surrounded(paths: dict[str, Any]) -> dict[str, Any]:
    """The routes, with what can befall every request: an error of ours, a head that is too large, and no key where
    one is asked for. Every answer has the request's id."""
    for path, operations in paths.items():
        is_guarded = path not in ALWAYS_OPEN
        around = (errors.ApiError, errors.HeadTooLarge, *([errors.Unauthorized] if is_guarded else []))
        for operation in operations.values():
            answers = _errors((*operation.pop("refusals"), *around)) | operation["responses"]
            operation["responses"] = dict(sorted(answers.items()))
            for answer in operation["responses"].values():
                answer["headers"] = {"x-request-id": _REQUEST_ID, **answer.get("headers", {})}
            if is_guarded:  # the empty one: where the server has no keys
                operation["security"] = [{_SCHEME: []}, {}]
        if "get" in operations:
            operations["head"] = _bodiless(operations["get"])
    return paths


def _bodiless(operation: dict[str, Any]) -> dict[str, Any]:
    """What HEAD is to GET."""
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
        answers["503"] = {"description": "Not now", "headers": headers, "content": content}
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
                *(_COME_BACK if refusals is _KEPT else ()),
                *(_WAIT if errors.QueueTimeout in refusals else ()),
            ],
            "requestBody": {"required": True, "content": taken},
            "refusals": refusals,
            "responses": {"200": {"description": "OK", "content": content}},
        }
    }


def _errors(kinds: tuple[type[errors.ApiError], ...]) -> dict[str, Any]:
    """The answers by status: one for all errors that share it."""
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
    """Server-sent events. The schema is that of one event, as OpenAPI before 3.2 can tell of them."""
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
