"""Load shedding: reject requests by their headers while the server is full.

Of four requests to a full server, three are rejected. Pure ASGI around the routes, since a rejection by a route, with
its checks and error handlers, costs over twice as much.
"""

from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.http.request_io import json_response
from service.protocol.errors import ApiError

ROUTES: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/embeddings"})
# With the first two headers, a response may already be buffered. A compressed body cannot be searched for `timeout`.
_CHANCES: Final = frozenset({b"idempotency-key", b"last-event-id", b"content-encoding"})


class LoadShedding:
    """ASGI middleware that calls `refuse` for requests that would wait for the engine.

    Requests that cannot be judged by their headers pass, and their routes decide.

    Args:
        refuse: raises an `ApiError` if no request with these headers would be admitted, whatever its body. A body that
            sets `timeout` is the exception, and is never passed to `refuse`.
        count: receives the error of each rejection.
    """

    def __init__(self, app: ASGIApp, *, refuse: Callable[[Scope], None], count: Callable[[ApiError], None]) -> None:
        self._app = app
        self._refuse = refuse
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in ROUTES or _has_chance(scope):
            await self._app(scope, receive, send)
            return
        first = await receive()
        if first["type"] == "http.request" and not first.get("more_body") and b'"timeout"' not in first["body"]:
            try:
                self._refuse(scope)
            except ApiError as error:
                self._count(error)
                await json_response(error.body(), error.status, error.headers())(scope, receive, send)
                return
        unread = [first]

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        await self._app(scope, receive_again, send)


def _has_chance(scope: Scope) -> bool:
    return any(
        name in _CHANCES or (name == b"accept" and value.strip().lower() == b"text/event-stream")
        for name, value in scope["headers"]
    )
