"""HTTP/1.1 without I/O: bytes of a request, and reader of a response. The load test and the fault suite share it."""

import socket
from collections.abc import Mapping
from typing import NamedTuple, Self

import httptools

_SLOW_READ_BYTES, _SLOW_BUFFER_BYTES = 256, 2048


class Pace(NamedTuple):
    """Speed at which a client reads a response: after each read of at most `num_bytes`, it pauses."""

    num_bytes: int = 65536
    pause_seconds: float = 0.0

    @classmethod
    def of(cls, bytes_per_second: float | None) -> Self:
        """Return the pace of a slow client with this rate; None: of a client that reads at once."""
        return cls() if bytes_per_second is None else cls(_SLOW_READ_BYTES, _SLOW_READ_BYTES / bytes_per_second)

    def prepare(self, connection: socket.socket) -> None:
        """Give the socket of a slow client a small buffer before it connects, so that the server must wait for it."""
        if self.pause_seconds:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)


AT_ONCE = Pace()


def request_bytes(path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """Return the bytes of a POST request with a JSON body."""
    fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("ascii") + body


class ResponseReader:
    """Incremental reader of the response to one request.

    now: arrival time of the last bytes. is_reusable: True if the connection can carry another request.
    """

    def __init__(self, now: float) -> None:
        self.now = now
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.is_reusable = False
        self._http = httptools.HttpResponseParser(self)

    def feed(self, data: bytes, now: float) -> None:
        """Parse bytes of the response, received at time `now`. Raises `httptools.HttpParserError` if not HTTP."""
        self.now = now
        self._http.feed_data(data)

    def end_of_connection(self, now: float) -> None:
        """Handle the end of the connection, which also ends a response without Content-Length and Transfer-Encoding."""
        self.now = now
        is_delimited = "content-length" in self.headers or "transfer-encoding" in self.headers
        if self.status is not None and not is_delimited and not self.is_complete:
            self.on_message_complete()
            self.is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header of the response. httptools calls this method and all other `on_` methods."""
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Store the status of the response."""
        self.status = self._http.get_status_code()

    def on_message_complete(self) -> None:
        """Mark the response as complete."""
        self.is_complete = True
        self.is_reusable = self._http.should_keep_alive()

    @property
    def is_stream(self) -> bool:
        """True if the response is a stream of server-sent events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")
