"""HTTP/1.1 on a socket of its own for each request, by clients with manners, and by those without."""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httptools

# No answer takes so long, whatever happens to the server: who waits longer has found a hang.
PATIENCE_SECONDS = 120.0


class Moment(StrEnum):
    """When a client leaves."""

    CONNECTED = "before a byte"
    HEAD = "in the head"
    BODY = "in the body"
    ASKED = "before the answer"
    ANSWERED = "in the answer"
    OVER = "after the answer"


@dataclass(frozen=True, slots=True)
class Reading:
    """How a client sends and reads.

    num_drops: pieces in which the request is sent, up to 50 ms apart.
    slow_seconds: time between two reads of 512 bytes; 0: all there is, at once.
    leaves: when the client leaves, before the end.
    leaves_after: where in the head, body or answer, as a share of it; of the time in seconds, before the answer.
    """

    num_drops: int = 1
    slow_seconds: float = 0.0
    leaves: Moment | None = None
    leaves_after: float = 0.5


@dataclass(slots=True)
class Reply:
    """What has come of an answer. `longest_gap` is the longest time between two pieces of it, in seconds."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    content: bytearray = field(default_factory=bytearray)
    is_complete: bool = False
    longest_gap: float = 0.0
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    _last_piece: float = 0.0

    @property
    def text(self) -> str:
        return self.content.decode()

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        now = time.monotonic()
        if self._last_piece:
            self.longest_gap = max(self.longest_gap, now - self._last_piece)
        self._last_piece = now
        self.content += body

    def on_message_complete(self) -> None:
        self.is_complete = True


def request_bytes(path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST, after which the connection ends."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {
        "host": "kvasir",
        "connection": "close",
        "content-type": "application/json",
        "content-length": str(len(content)),
        **(headers or {}),
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + content


async def exchange(port: int, sent: bytes, reading: Reading, choose: random.Random) -> Reply:
    """Send a request and read its answer, or the part of it that the client stays for.

    Raises:
        TimeoutError: it did not end in `PATIENCE_SECONDS`.
        ConnectionError: the other side ended the connection before the answer was complete.
    """
    reply = Reply()
    async with asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        try:
            await _send(writer, sent, reading, choose)
            if reading.leaves not in (Moment.CONNECTED, Moment.HEAD, Moment.BODY):
                await _read(reader, reply, reading)
        finally:
            reply.ended = time.monotonic()
            if choose.random() < 0.5:
                writer.transport.abort()
            writer.close()
    if reading.leaves is None and not reply.is_complete:
        raise ConnectionResetError(f"the connection ended {len(reply.content)} bytes into the answer")
    return reply


async def _send(writer: asyncio.StreamWriter, sent: bytes, reading: Reading, choose: random.Random) -> None:
    head = sent.index(b"\r\n\r\n") + 4
    part = {
        Moment.CONNECTED: 0,
        Moment.HEAD: int(head * reading.leaves_after),
        Moment.BODY: head + int((len(sent) - head) * reading.leaves_after),
    }
    end = len(sent) if reading.leaves is None else part.get(reading.leaves, len(sent))
    cuts = sorted(choose.randrange(end + 1) for _ in range(reading.num_drops - 1))
    for begin, stop in zip([0, *cuts], [*cuts, end], strict=True):
        writer.write(sent[begin:stop])
        await writer.drain()
        if reading.num_drops > 1:
            await asyncio.sleep(choose.uniform(0.0, 0.05))


async def _read(reader: asyncio.StreamReader, reply: Reply, reading: Reading) -> None:
    parser = httptools.HttpResponseParser(_Parsed(reply))
    if reading.leaves is Moment.ASKED:
        await asyncio.sleep(reading.leaves_after)
        return
    # An answer's length is not known before: leaving in the midst of it is leaving after some of its usual size.
    enough = reading.leaves_after * 8000 if reading.leaves is Moment.ANSWERED else float("inf")
    while not reply.is_complete and len(reply.content) < enough:
        piece = await reader.read(512 if reading.slow_seconds else 2**16)
        if not piece:
            return
        parser.feed_data(piece)
        reply.status = reply.status or parser.get_status_code()
        if reading.slow_seconds:
            await asyncio.sleep(reading.slow_seconds)


class _Parsed:
    """httptools calls what of these there is."""

    def __init__(self, reply: Reply) -> None:
        self.on_header = reply.on_header
        self.on_body = reply.on_body
        self.on_message_complete = reply.on_message_complete
