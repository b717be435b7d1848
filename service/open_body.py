"""A way past ASGI's `send` for a body that is under way: a part of it is written within the call.

Each token of a stream would otherwise wake a task, go through some twenty coroutines of routes and middleware and
through as many of them back, and cost twice as much. Of what is around the routes nothing looks at a body, only at its
head, which goes the whole way; so does every part that cannot be written now.
"""

from typing import Any, Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "kvasir.open_body"


class OpenBody(Protocol):
    """A body that can be written to, at times."""

    @property
    def is_writable(self) -> bool:
        """Whether it has begun, has not ended, and its client is neither gone nor behind."""
        ...

    def write(self, part: bytes) -> None:
        """Send a part, which is not empty, while it is writable."""
        ...


class ChunkedBody:
    """A chunked body of HTTP/1.1 (RFC 9112, 7.1), written as uvicorn's `send` writes it."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_writable(self) -> bool:
        """See `OpenBody`. Who is behind is waited for, by `send`."""
        cycle = self._cycle
        if not (cycle.response_started and cycle.chunked_encoding) or cycle.response_complete:
            return False
        return not (cycle.disconnected or cycle.flow.write_paused or cycle.transport.is_closing())

    def write(self, part: bytes) -> None:
        """See `OpenBody`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def extension(body: OpenBody) -> dict[str, Any]:
    """What a server says in a request's scope, under `extensions`, to let the application write to its body."""
    return {_EXTENSION: body}


def open_body(scope: Scope) -> OpenBody | None:
    """What the server offers; None from others, and for answers that are recorded."""
    extensions: dict[str, Any] = scope.get("extensions", {})
    return extensions.get(_EXTENSION)
