"""What surrounds every HTTP request: its id, its body within bounds, and errors in OpenAI's shape. Pure ASGI."""

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

from service.errors import ApiError, BodyTooLarge, InvalidRequest, MethodNotAllowed, RouteNotFound, UnsupportedEncoding
from service.responses import encode

# Lists and objects in a body: 4,096 messages of two parts each have 16,386.
MAX_CONTAINERS = 20_000
# One more of them, outside strings. Possessive throughout: one pass, whatever stands there.
_TOO_MANY = re.compile(rb'(?:(?:[^"\[{]++|"(?:[^"\\]++|\\.)*+"?)*+[\[{]){%d}+' % (MAX_CONTAINERS + 1), re.DOTALL)
REQUEST_ID = "x-request-id"
# What may be echoed into a header and a log line.
_SAFE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class RequestId:
    """ASGI middleware: every response carries the client's `x-request-id`, or one of ours if it has none fit."""

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
    """The request's body.

    Raises:
        BodyTooLarge: it is longer, or says that it is.
        UnsupportedEncoding: it is compressed. It would have to be bounded again.
        InvalidRequest: its length is no number, or it holds too many lists and objects.
        ClientDisconnect: the client left before its end.
    """
    too_large = BodyTooLarge(f"the body is over the limit of {max_bytes} bytes")
    if (encoding := request.headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
        raise UnsupportedEncoding(f"Content-Encoding {encoding[:50]!r} is not read here; send the body uncompressed")
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
    """Refuse a body of so many parts that all streams would stand still while it is read: an object takes 2 µs.

    Brackets within strings are text, and only looked at where there are many.
    """
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS and _TOO_MANY.match(body):
        raise InvalidRequest(f"the body holds over {MAX_CONTAINERS} lists and objects; send it in parts")


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with `value` as its JSON body."""
    return Response(encode(value), status, headers, "application/json")


def install_error_handlers(app: FastAPI, count: Callable[[ApiError], None]) -> None:
    """Answer every error in OpenAI's shape, unknown routes and our own bugs included, and count it."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        count(error)
        return json_response(error.body(), error.status, error.headers())

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        place = f"{request.method} {request.url.path[:200]}"
        if error.status_code == 405:
            answer = await api_error(request, MethodNotAllowed(f"{place}: this method is not allowed here"))
            answer.headers["allow"] = ", ".join(_methods(app, request.scope))
            return answer
        if error.status_code == 404:
            return await api_error(request, RouteNotFound(f"{place}: there is no such route"))
        return await api_error(request, InvalidRequest(str(error.detail)))

    async def client_left(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # to nobody

    async def our_fault(request: Request, error: Exception) -> Response:
        return await api_error(request, ApiError("internal error"))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_left)
    app.add_exception_handler(Exception, our_fault)


def _methods(app: FastAPI, scope: Scope) -> list[str]:
    """What a path answers to. Several routes may share one, and each knows only its own methods."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in route.methods or ()})
