"""`/openapi.json`: the routes with what they take, what they answer, and every status they can end with.

Requests are documented by the pydantic models that check them, answers by the structs that are encoded.
"""

import functools
import importlib.metadata
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service import chat_responses, chat_schemas, embedding_schemas, errors, inspection, responses, schemas
from service.access import ALWAYS_OPEN

_REF = "#/components/schemas/{name}"
_SCHEME = "apiKey"
_REFUSALS = (
    errors.InvalidRequest,
    errors.ModelNotFound,
    errors.BodyTooLarge,
)
_FAILURES = (errors.Overloaded, errors.EngineFailed, errors.Draining)
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
        "/v1/completions": _post(
            "Complete a prompt", schemas.CompletionRequest, completion | stream, (*_REFUSALS, *_FAILURES)
        ),
        "/v1/chat/completions": _post(
            "Answer a conversation", chat_schemas.ChatCompletionRequest, chat, (*_REFUSALS, *_FAILURES)
        ),
        "/v1/embeddings": _post(
            "Vectors of texts",
            embedding_schemas.EmbeddingRequest,
            _json(embedding_schemas.EmbeddingList),
            (*_REFUSALS, *_FAILURES),
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
                (*_REFUSALS, inspection.SwitchedOff, *_FAILURES),
            ),
        },
        "/health": _get("Is the process alive?", _json(responses.Health)),
        "/ready": _get("Would a request be served now?", _json(responses.Readiness), not_ready=True),
        "/version": _get("The version", _json(responses.Version)),
        "/metrics": _get("Metrics for Prometheus", text),
        "/playground": _get("A page to try the model", page),
        "/": _get("The playground", page),
    }


def _surrounded(paths: dict[str, Any]) -> dict[str, Any]:
    """The routes, with what can befall every request: a head that is too large, and no key where one is asked for."""
    for path, operations in paths.items():
        is_guarded = path not in ALWAYS_OPEN
        refusals = (errors.Unauthorized, errors.HeadTooLarge) if is_guarded else (errors.HeadTooLarge,)
        for operation in operations.values():
            operation["responses"] |= _errors(refusals)
            if is_guarded:  # the empty one: where the server has no keys
                operation["security"] = [{_SCHEME: []}, {}]
    return paths


def _get(
    summary: str,
    content: dict[str, Any],
    refusals: tuple[type[errors.ApiError], ...] = (),
    *,
    parameters: list[dict[str, Any]] | None = None,
    not_ready: bool = False,
) -> dict[str, Any]:
    answers = {"200": {"description": "OK", "content": content}, **_errors(refusals)}
    if not_ready:
        answers["503"] = {"description": "Not now; see Retry-After", "content": content}
    return {"get": {"summary": summary, "parameters": parameters or [], "responses": answers}}


def _post(
    summary: str, body: type[BaseModel], content: dict[str, Any], refusals: tuple[type[errors.ApiError], ...]
) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name=body.__name__)}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": {"200": {"description": "OK", "content": content}, **_errors(refusals)},
        }
    }


def _errors(refusals: tuple[type[errors.ApiError], ...]) -> dict[str, Any]:
    return {
        str(error.status): {"description": f"`{error.code}`", "content": _json(responses.ErrorBody)}
        for error in refusals
    }


def _stream(event: type[msgspec.Struct]) -> dict[str, Any]:
    """Server-sent events, each with such an object as its data."""
    return {"text/event-stream": {"schema": {"type": "string", "description": f"one {event.__name__} an event"}}}


def _json(answer: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=answer.__name__)}}}
