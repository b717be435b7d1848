"""Direct writes to a streaming response body that bypass ASGI's `send`.

With `send`, each token of a stream wakes a task and passes through about 20 coroutines of routes and middleware, which
doubles the cost of a token. The middleware inspects only the head of a response, and the head is sent by `send`. A part
that cannot be written directly is also sent by `send`.
"""

from typing import Any, Protocol

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "kvasir.open_body"


class OpenBody(Protocol):
    """Response body that accepts direct writes while `is_writable`."""

    @property
    def is_writable(self) -> bool:
        """True between the begin and the end of the body, while its client is connected and reads fast enough."""
        ...

    def write(self, part: bytes) -> None:
        """Send a non-empty part of the body. Call only while `is_writable`."""
        ...


class ChunkedBody:
    """HTTP/1.1 body in chunked encoding (RFC 9112, 7.1), in the same format as uvicorn's `send`."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_writable(self) -> bool:
        """See `OpenBody`. For a slow client use `send`, which waits."""
        cycle = self._cycle
        if not (cycle.response_started and cycle.chunked_encoding) or cycle.response_complete:
            return False
        return not (cycle.disconnected or cycle.flow.write_paused or cycle.transport.is_closing())

    def write(self, part: bytes) -> None:
        """See `OpenBody`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def extension(body: OpenBody) -> dict[str, Any]:
    """Return the entry for `extensions` in a request's ASGI scope that offers direct writes to the application."""
    return {_EXTENSION: body}


def open_body(scope: Scope) -> OpenBody | None:
    """Return the body for direct writes; None from other servers, and for buffered responses."""
    extensions: dict[str, Any] = scope.get("extensions", {})
    return extensions.get(_EXTENSION)
