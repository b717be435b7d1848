"""Server of `kvasir batch`: the HTTP client with retries, and a server process that the command starts itself."""

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from model.io.files import first_line
from service.cli.chat_client import retry_seconds

# A response that is not streamed sends nothing until it is complete.
_RESPONSE_SECONDS = 3600.0
_POLL_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 10.0
_BUSY = frozenset({408, 429, 502, 503, 504})
# Run by a new interpreter. The server ends when standard input does: when this process ends, even by SIGKILL.
_PROGRAM = """
import os, signal, sys, threading
sys.path[:] = {path!r}
def watch():
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=watch, name="kvasir-watch", daemon=True).start()
from service.cli.main import main
sys.exit(main({arguments!r}))
"""


class ServerGone(RuntimeError):
    """Error of a server that cannot be reached, or does not start. The batch ends, and can be continued later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Last HTTP response to a request. `body`: the parsed JSON, or a text that is not JSON."""

    status: int
    request_id: str
    body: Any


@dataclass(eq=False)
class BatchClient:
    """HTTP client that waits and retries while the server is busy. Each thread has a connection of its own."""

    url: str
    api_key: str | None
    max_retries: int
    _is_cancelled: threading.Event = field(default_factory=threading.Event)
    _local: threading.local = field(default_factory=threading.local)
    _connections: list[http.client.HTTPConnection] = field(default_factory=list)

    def post(self, path: str, body: Any, key: str) -> Reply:
        """Send a request, and return the response to its last attempt.

        key: idempotency key, with which a retry gets the response to an earlier attempt whose connection was lost.

        Raises:
            ServerGone: the server does not respond, is still busy, or rejects the API key; or `cancel` was called.
        """
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": key,
            "X-Request-Timeout": "86400",  # wait in the queue as long as the server allows
            **({} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}),
        }
        path, content = urlsplit(self.url).path.rstrip("/").removesuffix("/v1") + path, json.dumps(body).encode()
        for attempt in range(self.max_retries + 1):
            seconds = min(0.1 * 2**attempt, _MAX_BACKOFF_SECONDS)
            connection = self._connection()
            try:
                if connection.sock is None:
                    connection.connect()
                if self._is_cancelled.is_set():  # `cancel` ends only connections that it has seen
                    break
                connection.request("POST", path, content, headers)
                response = connection.getresponse()
                text = response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                problem = f"does not respond: {first_line(error)}"
            else:
                if response.status == 401:
                    raise ServerGone(f"{self.url} rejects the API key; set KVASIR_API_KEY, and run the same command")
                if not _can_retry(response):
                    request_id = response.headers.get("x-request-id", "")
                    return Reply(status=response.status, request_id=request_id, body=_parse(text))
                problem = f"is busy: status {response.status}"
                seconds = max(seconds, retry_seconds(response) or 0.0)
            if attempt < self.max_retries and self._is_cancelled.wait(seconds):
                break
        else:
            raise ServerGone(f"{self.url} {problem}; run the same command later to continue")
        raise ServerGone("the batch was interrupted; run the same command to continue")

    def cancel(self) -> None:
        """End all requests: each `post` that runs raises ServerGone."""
        self._is_cancelled.set()
        for connection in self._connections:
            if (sock := connection.sock) is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections. Call when no request runs."""
        for connection in self._connections:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            parts = urlsplit(self.url)
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            connection = self._local.connection = kind(parts.netloc, timeout=_RESPONSE_SECONDS)
            self._connections.append(connection)
        return connection


def _can_retry(response: http.client.HTTPResponse) -> bool:
    """Return True if the same request can succeed later: the server says so, or is busy or restarting."""
    return response.headers.get("x-should-retry", str(response.status in _BUSY).lower()) == "true"


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")


@contextmanager
def own_server(checkpoint: Path) -> Iterator[str]:
    """Start a server for a checkpoint, wait until it is ready, and yield its URL. Afterwards end it.

    Raises:
        ServerGone: the server does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    arguments = ["serve", "--checkpoint", str(checkpoint), "--host", "127.0.0.1", "--port", str(port)]
    program = _PROGRAM.format(path=sys.path, arguments=[*arguments, "--no-standby", "--target-queue-seconds", "0"])
    with tempfile.TemporaryFile() as log:
        # A process group of its own: Ctrl-C in a terminal reaches this process only.
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            process_group=0,
        )
        try:
            while not _is_ready(port):
                if process.poll() is not None:
                    log.seek(0)
                    lines = log.read().decode(errors="replace").strip().splitlines() or ["no message"]
                    raise ServerGone(f"the server did not start: {lines[-1]}")
                time.sleep(_POLL_SECONDS)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            with suppress(KeyboardInterrupt):
                process.wait()
            if process.poll() is None:
                process.terminate()  # a second signal stops at once
                process.wait()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
