"""Raw bytes sent to a server's socket, and the bytes of the response."""

import json
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.e2e.process import NO_TLS, PATIENCE_SECONDS, Service

ALICE, BOB, CAROL = "sk-alice-0123456789abcdef", "sk-bob-0123456789abcdef", "sk-carol-0123456789abcdef"
MAX_CONNECTIONS = 40
BEARER = {"authorization": f"Bearer {ALICE}"}
_KEY = f"host: a\r\nauthorization: Bearer {ALICE}\r\n".encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes that a server sent before it closed the connection or the wait timed out."""

    text: bytes
    is_closed: bool

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", self.text)]

    @property
    def head(self) -> str:
        return self.text.partition(b"\r\n\r\n")[0].decode()

    @property
    def error(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.text.partition(b"\r\n\r\n")[2])
        return dict(body["error"])


def connect(service: Service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(service.url).port or 0), timeout=PATIENCE_SECONDS)


def request(
    *fields: bytes, line: bytes = b"POST /v1/completions HTTP/1.1", body: bytes = b"", is_last: bool = True
) -> bytes:
    """Return the bytes of a request with an API key and more header fields, after which the server closes."""
    lines = [line, _KEY + (b"connection: close" if is_last else b"a: b"), *fields, b"", body]
    return b"\r\n".join(lines)


def exchange(service: Service, sent: bytes) -> Answer:
    """Send bytes, and read until the server closes the connection."""
    with connect(service) as connection:
        with suppress(OSError):  # the server may close the connection before it has read all bytes
            connection.sendall(sent)
        text = b""
        try:
            while piece := connection.recv(65536):
                text += piece
        except ConnectionResetError:
            return Answer(text, is_closed=True)
        except TimeoutError:
            return Answer(text, is_closed=False)
        return Answer(text, is_closed=True)


def post(service: Service, body: bytes, path: str = "/v1/completions", **fields: str) -> httpx.Response:
    return httpx.post(
        service.url + path, content=body, headers={**BEARER, **fields}, timeout=PATIENCE_SECONDS, verify=NO_TLS
    )


def is_well(service: Service) -> bool:
    """Return True if the server answers a completion request."""
    return post(service, b'{"prompt": "once", "max_tokens": 2}').status_code == 200
