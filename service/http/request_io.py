"""HTTP request handling of all routes: body limits, JSON responses, errors in the format of the route."""

import re
from collections.abc import Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope

from service.protocol.errors import (
    ApiError,
    BodyTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    RouteNotFound,
    UnsupportedEncoding,
)
from service.protocol.messages import is_messages_path, messages_error
from service.protocol.responses import encode, encode_event

# Lists and objects in a body: 4,096 messages of two parts each have 16,386.
MAX_CONTAINERS = 20_000
# Matches one more opening bracket than the limit, outside strings. Possessive quantifiers prevent backtracking.
_TOO_MANY = re.compile(rb'(?:(?:[^"\[{]++|"(?:[^"\\]++|\\.)*+"?)*+[\[{]){%d}+' % (MAX_CONTAINERS + 1), re.DOTALL)
TIMEOUT_HEADER = "x-request-timeout"
REQUEST_ID = "x-request-id"  # response header, and attribute of `request.state`
ERROR = "error"  # attribute of `request.state`: class of the error that the request's response reports


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Read the body of a request. Raises an `ApiError` for an unusable body, ClientDisconnect for an incomplete one."""
    too_large = BodyTooLarge(f"the body is over the limit of {max_bytes} bytes")
    if (encoding := request.headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
        raise UnsupportedEncoding(f"Content-Encoding {encoding[:50]!r} is not supported; send the body uncompressed")
    try:
        if int(request.headers.get("content-length", 0)) > max_bytes:
            raise too_large
    except ValueError:
        raise InvalidRequest("the header Content-Length is not a number; send the size of the body in bytes") from None
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        chunks.append(chunk)
    body = b"".join(chunks)
    # Parsing takes 2 µs a list or object and would delay all streams. The regex, which skips brackets within strings,
    # runs only if a plain count of brackets is over the limit.
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS and _TOO_MANY.match(body):
        raise InvalidRequest(f"the JSON body holds over {MAX_CONTAINERS} lists and objects; split the request")
    return body


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client of a request has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an HTTP response with `value` as its JSON body."""
    return Response(encode(value), status, headers, "application/json")


def error_body(error: ApiError, scope: Scope) -> object:
    """Return the JSON body of an error response: in Anthropic's format for Anthropic's routes, else in OpenAI's."""
    if is_messages_path(scope["path"]):
        return messages_error(error, scope.get("state", {}).get(REQUEST_ID))
    return error.body()


def error_event(error: ApiError, path: str) -> bytes:
    """Return the bytes of the SSE event by which an error ends a stream of the route `path`."""
    body = error_body(error, {"path": path})
    return encode_event(body, b"event: error\ndata: ") if is_messages_path(path) else encode_event(body)


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the HTTP response that reports an error to the client, in the format of the request's route (`scope`)."""
    return json_response(error_body(error, scope), error.status, error.headers())


def keep_error(scope: Scope, error: ApiError) -> None:
    """Store the class of a response's error in the request's state, for the request log and traces.

    Not the error itself: its traceback would keep the request body, megabytes, until garbage collection.
    """
    scope.setdefault("state", {})[ERROR] = type(error)


def install_error_handlers(app: FastAPI, count: Callable[[ApiError], None]) -> None:
    """Make `app` count every error and send it in the route's format, including those of unknown routes and bugs."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # never sent: the client has disconnected
        reported = error if isinstance(error, ApiError) else ApiError("internal error")
        if isinstance(error, HTTPException):
            route = f"{request.method} {request.url.path[:200]}"
            if error.status_code == 404:
                reported = RouteNotFound(f"{route}: there is no such route; see /openapi.json")
            elif error.status_code == 405:
                reported = MethodNotAllowed(f"{route}: this method is not allowed; use a method of the Allow header")
            else:
                reported = InvalidRequest(str(error.detail))
        count(reported)
        keep_error(request.scope, reported)
        response = error_response(reported, request.scope)
        if not isinstance(error, (ApiError, HTTPException)):  # the server closes the connection after a bug
            response.headers["connection"] = "close"
        if isinstance(reported, MethodNotAllowed):
            # Several routes may share a path, each with its own methods.
            routes = [r for r in app.routes if isinstance(r, Route) and r.matches(request.scope)[0] is not Match.NONE]
            response.headers["allow"] = ", ".join(sorted({method for r in routes for method in r.methods or ()}))
        return response

    for kind in (ApiError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, handle)
