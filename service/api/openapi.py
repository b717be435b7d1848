"""Table of the API's routes, from which the handlers are registered and `/openapi.json` is made."""

import functools
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.api import attention
from service.http.middleware import ALWAYS_OPEN
from service.protocol import (
    adapters,
    chat,
    completions,
    embeddings,
    errors,
    messages,
    model_responses,
    responses,
    responses_request,
    scores,
)

Errors = tuple[type[errors.ApiError], ...]
_REF = "#/components/schemas/"
_ALWAYS: Errors = (errors.ApiError, errors.HeadTooLarge)
_BODY: Errors = (
    errors.InvalidRequest,
    errors.ModelNotFound,
    errors.BodyTooLarge,
    errors.RequestTimeout,
    errors.UnsupportedEncoding,
)
_ENGINE: Errors = (
    *_BODY,
    errors.ContextLengthExceeded,
    errors.Overloaded,
    errors.QueueTimeout,
    errors.EngineFailed,
    errors.Draining,
)
_RESUMABLE: Errors = (*_ENGINE, errors.WaitTooLong, errors.ResponseGone, errors.IdempotencyKeyReused)

_RENDER: Errors = (*_BODY, errors.ContextLengthExceeded, errors.Overloaded, errors.EngineFailed)

_PROMPT = "Once upon a time"
_MESSAGES = [{"role": "user", "content": "Tell me a story."}]
_RANKED = {"query": "Where is the dog?", "documents": ["The dog slept.", "The dog is in the hat."], "top_n": 1}
_GREEDY = {"max_tokens": 8, "temperature": 0}


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """One route of the API.

    handler: attribute path from `Frontend` to the handler ("completions.complete_chat"); "": FastAPI handles the route.
    content: class of the JSON response's body; for a response that is not JSON, its media type.
    is_list: the response is a JSON list of `content`.
    event: class of each event's data, if the response can be a stream.
    request: model of the JSON request body, if the route reads a body.
    errors: classes of error responses, besides the errors that every route can return. Those of `_RESUMABLE` mark a
        route whose handler `ApiContext.resumable` makes.
    examples: example request bodies by name.
    """

    method: str
    path: str
    handler: str
    summary: str
    content: type[msgspec.Struct] | str
    request: type[BaseModel] | None = None
    event: type[msgspec.Struct] | None = None
    errors: Errors = ()
    is_list: bool = False
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_resumable(self) -> bool:
        return errors.IdempotencyKeyReused in self.errors


ROUTES = (
    RouteEntry(
        *("POST", "/v1/completions", "completions.complete_prompt", "Complete a prompt"),
        *(responses.Completion, completions.CompletionRequest, responses.Completion, _RESUMABLE),
        examples={
            "greedy": {"prompt": _PROMPT, **_GREEDY},
            "sampled": {"prompt": [_PROMPT, "The dog"], "n": 2, "seed": 1, "top_p": 0.9, "stop": ["\n\n"]},
            "streamed": {"prompt": _PROMPT, **_GREEDY, "stream": True, "stream_options": {"include_usage": True}},
            "scored": {"prompt": _PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1},
        },
    ),
    RouteEntry(
        *("POST", "/v1/chat/completions", "completions.complete_chat", "Complete a conversation"),
        *(responses.ChatCompletion, chat.ChatCompletionRequest, responses.ChatCompletionChunk, _RESUMABLE),
        examples={
            "greedy": {"messages": _MESSAGES, **_GREEDY},
            "streamed": {"messages": _MESSAGES, **_GREEDY, "stream": True},
        },
    ),
    RouteEntry(
        *("POST", "/v1/completions/render", "completions.render_prompt", "Get the token ids of each prompt"),
        *(responses.RenderedPrompt, completions.CompletionRequest, None, _RENDER),
        is_list=True,
        examples={"prompts": {"prompt": [_PROMPT, "The dog"]}},
    ),
    RouteEntry(
        *("POST", "/v1/chat/completions/render", "completions.render_chat", "Get the token ids of a conversation"),
        *(responses.RenderedPrompt, chat.ChatCompletionRequest, None, _RENDER),
        examples={"conversation": {"messages": _MESSAGES}},
    ),
    RouteEntry(
        *("POST", "/v1/responses", "responses.create", "Continue a conversation, in OpenAI's Responses API"),
        *(model_responses.ModelResponse, responses_request.ResponsesRequest, model_responses.ModelResponseEvent),
        (*_RESUMABLE, errors.ResponseNotFound, errors.ResponseStoreFull),
        examples={
            "text": {"input": _PROMPT, "max_output_tokens": 16, "temperature": 0, "store": False},
            "conversation": {"input": _MESSAGES, "instructions": "Be brief.", "stream": True},
        },
    ),
    RouteEntry(
        *("GET", "/v1/responses/{response_id}", "responses.read", "Get a stored response, or the events of its stream"),
        *(model_responses.ModelResponse, None, model_responses.ModelResponseEvent),
        (errors.InvalidRequest, errors.ResponseNotFound, errors.ResponseGone),
    ),
    RouteEntry(
        *("DELETE", "/v1/responses/{response_id}", "responses.delete", "Delete a stored response"),
        model_responses.DeletedResponse,
        errors=(errors.ResponseNotFound,),
    ),
    RouteEntry(
        *("POST", "/v1/responses/{response_id}/cancel", "responses.cancel", "Cancel a background response"),
        model_responses.ModelResponse,
        errors=(errors.InvalidRequest, errors.ResponseNotFound),
    ),
    RouteEntry(
        *("GET", "/v1/responses/{response_id}/input_items", "responses.input_items", "List a response's input items"),
        model_responses.InputItemList,
        errors=(errors.InvalidRequest, errors.ResponseNotFound),
    ),
    RouteEntry(
        *("POST", "/v1/messages", "messages.create", "Continue a conversation, in Anthropic's Messages API"),
        *(messages.GeneratedMessage, messages.MessagesRequest, messages.MessageEvent, _RESUMABLE),
        examples={
            "greedy": {"messages": _MESSAGES, **_GREEDY},
            "streamed": {"messages": _MESSAGES, "system": "Be brief.", "max_tokens": 8, "stream": True},
        },
    ),
    RouteEntry(
        *("POST", "/v1/messages/count_tokens", "messages.count_tokens", "Count the tokens of a Messages API request"),
        *(messages.TokenCount, messages.CountTokensRequest, None, _RENDER),
        examples={"conversation": {"messages": _MESSAGES}},
    ),
    RouteEntry(
        *("POST", "/v1/embeddings", "embeddings.embed", "Compute embeddings of texts"),
        *(embeddings.EmbeddingList, embeddings.EmbeddingRequest, None, _RESUMABLE),
        examples={
            "texts": {"input": [_PROMPT, "The dog"]},
            "short": {"input": _PROMPT, "dimensions": 16, "encoding_format": "base64"},
        },
    ),
    RouteEntry(
        *("POST", "/v1/score", "scores.score", "Score pairs of texts"),
        *(scores.ScoreList, scores.ScoreRequest, None, _RESUMABLE),
        examples={
            "one to many": {"text_1": "Where is the dog?", "text_2": ["The dog slept.", "The dog is in the hat."]}
        },
    ),
    *(
        RouteEntry(
            *("POST", path, "scores.rerank", "Rank documents by their relevance to a query"),
            *(scores.Ranking, scores.RerankRequest, None, _RESUMABLE),
            examples={"the best": _RANKED},
        )
        for path in ("/v1/rerank", "/rerank")
    ),
    RouteEntry("GET", "/v1/models", "models", "List the served model, its aliases and adapters", responses.ModelList),
    RouteEntry(
        *("GET", "/v1/models/{model_id:path}", "model", "Describe the served model", responses.ModelCard),
        errors=(errors.ModelNotFound,),
    ),
    RouteEntry(
        *("POST", "/v1/load_lora_adapter", "adapters.load", "Load a LoRA adapter from a directory below --lora-dir"),
        *("text/plain", adapters.LoadAdapterRequest),
        errors=(*_BODY, errors.RouteDisabled),
        examples={"an adapter": {"lora_name": "tales", "lora_path": "tales"}},
    ),
    RouteEntry(
        *("POST", "/v1/unload_lora_adapter", "adapters.unload", "Unload a LoRA adapter"),
        *("text/plain", adapters.UnloadAdapterRequest),
        errors=(*_BODY, errors.RouteDisabled),
        examples={"an adapter": {"lora_name": "tales"}},
    ),
    RouteEntry(
        *("POST", "/tokenize", "tokenize", "Convert a text or a conversation to token ids"),
        *(responses.Tokenized, chat.TokenizeRequest),
        errors=(*_BODY, errors.EngineFailed),
        examples={"text": {"prompt": _PROMPT, "return_token_strs": True}, "conversation": {"messages": _MESSAGES}},
    ),
    RouteEntry(
        *("POST", "/detokenize", "detokenize", "Convert token ids to text"),
        *(responses.Detokenized, completions.DetokenizeRequest),
        errors=_BODY,
        examples={"text": {"tokens": [104, 105]}},
    ),
    RouteEntry(
        *("GET", "/tokenizer_info", "tokenizer_info", "Get the special tokens and the chat template"),
        responses.TokenizerInfo,
    ),
    RouteEntry(
        *("GET", "/inspect/attention", "inspection.limits", "Get the number of layers and heads, and the prompt limit"),
        attention.AttentionLimits,
        errors=(errors.RouteDisabled,),
    ),
    RouteEntry(
        *("POST", "/inspect/attention", "inspection.attention", "Compute a layer's attention weights over a prompt"),
        *(attention.AttentionWeights, attention.AttentionRequest),
        errors=(*_ENGINE, errors.RouteDisabled),
        examples={"a head": {"prompt": "The dog", "layer": 0, "head": 0}},
    ),
    RouteEntry("GET", "/health", "health", "Check that the API process is alive", responses.Health),
    RouteEntry("GET", "/ready", "ready", "Check that the server is ready", responses.Readiness),
    RouteEntry("GET", "/version", "version", "Get the version of the server", responses.Version),
    RouteEntry("GET", "/server_info", "server_info", "Get the model's name, for routers", responses.ServerInfo),
    RouteEntry("GET", "/metrics", "metrics", "Get metrics for Prometheus", "text/plain"),
    RouteEntry("GET", "/openapi.json", "", "Get this OpenAPI document", "application/json"),
    RouteEntry("GET", "/playground", "playground", "Get the playground, a web page to try the model", "text/html"),
    RouteEntry("GET", "/", "playground", "Get the playground, as from /playground", "text/html"),
)
# Paths of the routes whose requests wait for the engine.
WAITING_PATHS = frozenset(route.path for route in ROUTES if route.is_resumable)


def _parameter(name: str, description: str, *, place: str = "header", **schema: Any) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "description": description, "schema": schema}


_KEY = "Key that names this request. A retry of the request with the same key gets the first attempt's response."
_LAST_EVENT = "Resumes an earlier stream after its event with this id. Empty: the same as no header."
_API_KEY = "An API key, if the server requires API keys."
_TIMEOUT = "Maximum seconds in the queue, like the field timeout of the body. The shorter of the two limits applies."
_ID = _parameter("response_id", "Id of the response", place="path", type="string")
_QUERIES = {
    "responses.read": [
        _parameter("stream", "Get the events of a background response", place="query", type="boolean"),
        _parameter("starting_after", "Sequence number of the last event received", place="query", type="integer"),
    ],
    "responses.input_items": [
        _parameter("limit", "Maximum number of items, 1 to 100", place="query", type="integer"),
        _parameter("order", "Order of the items", place="query", enum=["asc", "desc"]),
        _parameter("after", "Id of the item before the first one listed", place="query", type="string"),
    ],
}
_RESUME_HEADERS = [
    _parameter("Idempotency-Key", _KEY, type="string", pattern="^[!-~]{1,255}$"),
    _parameter("Last-Event-ID", _LAST_EVENT, type="string", pattern="^([0-9a-f]{32}/[0-9]{1,9})?$"),
]
_TIMEOUT_HEADER = _parameter("x-request-timeout", _TIMEOUT, type="number", exclusiveMinimum=0)


def _header(name: str, description: str, **schema: Any) -> dict[str, Any]:
    return {name: {"description": description, "schema": schema or {"type": "string"}}}


_REQUEST_ID = _header("x-request-id", "The request id that the client sent, if valid; else an id made by the server")
_RETRY_AFTER = _header("retry-after", "Whole seconds to wait before a retry")
_RETRY_AFTER_MS = _header("retry-after-ms", "Milliseconds to wait before a retry")
_SHOULD_RETRY = _header("x-should-retry", "true if a retry can succeed, else false", enum=["true", "false"])
_ERROR_HEADERS = {
    errors.RetryLater: {**_RETRY_AFTER, **_RETRY_AFTER_MS, **_SHOULD_RETRY},
    errors.EngineFailed: _SHOULD_RETRY,
    errors.Unauthorized: _header("www-authenticate", "Authentication scheme that the server expects"),
}


@functools.cache
def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of all routes, with schemas from the request models and response structs."""
    requests = [(route.request, "validation") for route in ROUTES if route.request is not None]
    _, request_schemas = models_json_schema(requests, ref_template=_REF + "{model}")  # type: ignore[arg-type]
    structs = [struct for route in ROUTES for struct in (route.content, route.event) if isinstance(struct, type)]
    _, response_schemas = msgspec.json.schema_components(
        [*structs, responses.ErrorBody, messages.MessagesErrorBody], ref_template=_REF + "{name}"
    )
    paths: dict[str, Any] = {}
    for route in ROUTES:
        operation = _operation(route)
        operations = paths.setdefault(route.path.replace(":path}", "}"), {})
        operations[route.method.lower()] = operation
        if route.method == "GET":
            answers = {status: {**answer, "content": {}} for status, answer in operation["responses"].items()}
            operations["head"] = {**operation, "responses": answers}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kvasir",
            "version": importlib.metadata.version("kvasir"),
            "description": "A language model, with OpenAI's and Anthropic's APIs.",
        },
        "paths": paths,
        "components": {
            "schemas": {**request_schemas["$defs"], **response_schemas},
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer", "description": _API_KEY}},
        },
    }


def _operation(route: RouteEntry) -> dict[str, Any]:
    is_guarded = route.path not in ALWAYS_OPEN
    answers: dict[str, Any] = {"200": {"description": "OK", "headers": _REQUEST_ID, "content": _content(route)}}
    if route.content is responses.Readiness:
        headers = {**_REQUEST_ID, **_RETRY_AFTER}
        answers["503"] = {"description": "Not ready", "headers": headers, "content": _content(route)}
    kinds: Errors = (*_ALWAYS, *route.errors, *([errors.Unauthorized] if is_guarded else []))
    for error in kinds:
        answer = answers.setdefault(
            str(error.status), {"description": "", "headers": {**_REQUEST_ID}, "content": _json(_error_body(route))}
        )
        answer["description"] += f"{' or ' if answer['description'] else ''}`{error.code}`"
        for kind, headers in _ERROR_HEADERS.items():
            if issubclass(error, kind):
                answer["headers"] |= headers
    parameters = [_ID] if "{response_id}" in route.path else []
    parameters += [_parameter("model_id", "Model or alias", place="path", type="string")] if "{m" in route.path else []
    parameters += _QUERIES.get(route.handler, [])
    parameters += _RESUME_HEADERS if route.is_resumable else []
    parameters += [_TIMEOUT_HEADER] if errors.QueueTimeout in route.errors else []
    operation: dict[str, Any] = {"summary": route.summary, "parameters": parameters, "responses": answers}
    if route.request is not None:
        content = _json(route.request)
        content["application/json"]["examples"] = {name: {"value": body} for name, body in route.examples.items()}
        operation["requestBody"] = {"required": True, "content": content}
    if is_guarded:  # the empty requirement: a server without keys
        operation["security"] = [{"apiKey": []}, {}]
    return operation


def _content(route: RouteEntry) -> dict[str, Any]:
    if isinstance(route.content, str):
        return {route.content: {"schema": {"type": "object" if route.content == "application/json" else "string"}}}
    content = _json(route.content)
    if route.is_list:
        content["application/json"]["schema"] = {"type": "array", "items": content["application/json"]["schema"]}
    if route.event is not None:
        # The schema describes one event, because OpenAPI before 3.2 has no streams.
        has_own_error = route.event is model_responses.ModelResponseEvent
        kinds = [route.event] if has_own_error else [route.event, _error_body(route)]
        refs = [{"$ref": _REF + kind.__name__} for kind in kinds]
        data: dict[str, Any] = {"contentMediaType": "application/json", "contentSchema": {"anyOf": refs}}
        schema: dict[str, Any] = {"description": "one event of the stream", "type": "object"}
        if has_own_error or route.event is messages.MessageEvent:
            schema["properties"] = {"event": {"type": "string"}, "data": {"type": "string", **data}}
        else:
            schema["description"] += "; the last event is [DONE]"
            schema["properties"] = {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}}
        content["text/event-stream"] = {"schema": {**schema, "required": list(schema["properties"])}}
    return content


def _error_body(route: RouteEntry) -> type[msgspec.Struct]:
    return messages.MessagesErrorBody if messages.is_messages_path(route.path) else responses.ErrorBody


def _json(kind: type[object]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF + kind.__name__}}}
