"""Refuses what has no chance before it costs anything: of four that come to a full server, three have none.

Pure ASGI, around the routes: through the router, its checks and its error handlers a refusal costs over twice as much.
"""

from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ApiError
from service.requests import json_response

ROUTES: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/embeddings"})
# Who sends one of these may want an answer that is there already; and what is compressed is read by nobody here.
_CHANCES: Final = frozenset({b"idempotency-key", b"last-event-id", b"content-encoding"})


class EarlyRefusal:
    """ASGI middleware: asks `refuse` about the requests that would wait for the engine.

    Not about those that it cannot judge by their head: their routes refuse them.

    Args:
        refuse: raises an `ApiError` where no request with this head would be taken, whatever its body asks for; a body
            that names a `timeout` may be.
        count: told of each refusal.
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
