"""HTTP itself, within bounds: uvicorn's protocol on httptools, which takes as long a request head as a client sends.

The head is the request line and the header fields. One over the bounds is a 431, and one that is no HTTP a 400, both in
the shape of our errors; the connection is closed.
"""

from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.errors import HeadTooLarge, InvalidRequest
from service.responses import encode

# What nginx takes by default is 32 KiB, and browsers send under a hundred fields.
MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 100
_REASONS: Final = {400: "Bad Request", 431: "Request Header Fields Too Large"}


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. What uvicorn does, with a bound on what a request's head may hold."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = self._is_in_body = False
        self._num_head_bytes = 0  # received of a head that is not complete
        self._has_passed_head = False  # in these bytes
        self._is_too_large = False

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        was_in_body, self._has_passed_head = self._is_in_body, False
        super().data_received(data)
        is_head_alone = not (was_in_body or self._has_passed_head)
        if self._is_in_head and is_head_alone and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._is_too_large = True
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """The head's end. What is raised here reaches uvicorn as a request that is not HTTP."""
        self._is_in_head, self._is_in_body, self._has_passed_head = False, True, True
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._is_too_large = True
            raise ValueError("the head is too large")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body's end."""
        self._is_in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request of ours, and close."""
        error = InvalidRequest("this is not HTTP/1.1, or not whole")
        if self._is_too_large:
            error = HeadTooLarge(
                f"the request's header fields are over the limit of {MAX_HEADERS} fields or {MAX_HEAD_BYTES} bytes"
            )
        body = encode(error.body())
        head = (
            f"HTTP/1.1 {error.status} {_REASONS[error.status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
