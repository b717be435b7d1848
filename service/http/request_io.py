"""HTTP request handling common to all routes: request ids, body limits, errors in OpenAI's format."""

import re
import uuid
from collections.abc import Callable

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.protocol.errors import (
    ApiError,
    BodyTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    RouteNotFound,
    UnsupportedEncoding,
)
from service.protocol.responses import encode

# Lists and objects in a body: 4,096 messages of two parts each have 16,386.
MAX_CONTAINERS = 20_000
# Matches one more opening bracket than the limit, outside strings. Possessive quantifiers prevent backtracking.
_TOO_MANY = re.compile(rb'(?:(?:[^"\[{]++|"(?:[^"\\]++|\\.)*+"?)*+[\[{]){%d}+' % (MAX_CONTAINERS + 1), re.DOTALL)
REQUEST_ID = "x-request-id"
TIMEOUT_HEADER = "x-request-timeout"
# Request ids that are safe to echo into a header and a log line.
_SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestId:
    """ASGI middleware: put an `x-request-id` on every response, the client's or, if missing or unsafe, a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID.encode(), b"").decode("latin-1")
        request_id = given if _SAFE_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Read the request's body.

    Raises:
        BodyTooLarge: the body or its Content-Length is over `max_bytes`.
        UnsupportedEncoding: the body is compressed. Its uncompressed size would need a limit of its own.
        InvalidRequest: Content-Length is not a number, or the body holds too many lists and objects.
        ClientDisconnect: the client disconnected before the end of the body.
    """
    too_large = BodyTooLarge(f"the body is over the limit of {max_bytes} bytes")
    if (encoding := request.headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
        raise UnsupportedEncoding(f"Content-Encoding {encoding[:50]!r} is not supported; send the body uncompressed")
    try:
        if int(request.headers.get("content-length", 0)) > max_bytes:
            raise too_large
    except ValueError:
        raise InvalidRequest("Content-Length is not a number") from None
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        chunks.append(chunk)
    body = b"".join(chunks)
    _check_structure(body)
    return body


def _check_structure(body: bytes) -> None:
    """Reject a body with more than `MAX_CONTAINERS` lists and objects.

    Parsing takes 2 µs an object and would delay all streams. The regex, which skips brackets within strings, runs only
    if a plain count of brackets is over the limit.
    """
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS and _TOO_MANY.match(body):
        raise InvalidRequest(f"the body holds over {MAX_CONTAINERS} lists and objects; split the request")


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with `value` as its JSON body."""
    return Response(encode(value), status, headers, "application/json")


def install_error_handlers(app: FastAPI, count: Callable[[ApiError], None]) -> None:
    """Install handlers that count every error and send it in OpenAI's format, unknown routes and bugs included."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        count(error)
        return json_response(error.body(), error.status, error.headers())

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        method_and_path = f"{request.method} {request.url.path[:200]}"
        if error.status_code == 405:
            response = await api_error(
                request,
                MethodNotAllowed(f"{method_and_path}: this method is not allowed; use a method of the Allow header"),
            )
            response.headers["allow"] = ", ".join(_methods(app, request.scope))
            return response
        if error.status_code == 404:
            return await api_error(
                request, RouteNotFound(f"{method_and_path}: there is no such route; see /openapi.json")
            )
        return await api_error(request, InvalidRequest(str(error.detail)))

    async def client_left(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # never sent: the client has disconnected

    async def our_fault(request: Request, error: Exception) -> Response:
        return await api_error(request, ApiError("internal error"))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_left)
    app.add_exception_handler(Exception, our_fault)


def _methods(app: FastAPI, scope: Scope) -> list[str]:
    """Return the methods of a path. Several routes may share a path, each with its own methods."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in route.methods or ()})
