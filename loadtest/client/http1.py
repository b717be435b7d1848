"""HTTP/1.1 without I/O: bytes of a request, and reader of a response. The load test and the fault suite share it."""

from collections.abc import Mapping

import httptools


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
