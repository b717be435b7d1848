"""HTTP/1.1 client with one socket per request, which can send and read slowly and disconnect at any stage."""

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httptools

# A response that takes longer is a hang, since no fault delays a response for so long.
PATIENCE_SECONDS = 120.0


class Moment(StrEnum):
    """Stage of a request at which a client disconnects."""

    CONNECTED = "before a byte"
    HEAD = "in the head"
    BODY = "in the body"
    ASKED = "before the answer"
    ANSWERED = "in the answer"
    OVER = "after the answer"


@dataclass(frozen=True, slots=True)
class Reading:
    """Behaviour of a client.

    num_drops: number of pieces in which the request is sent, up to 50 ms apart.
    slow_seconds: time between two reads of 512 bytes; 0 to read all available bytes without a pause.
    leaves: stage at which the client disconnects; None if it reads the whole response.
    leaves_after: share of the head, body or response before the disconnect; for `Moment.ASKED`, seconds.
    """

    num_drops: int = 1
    slow_seconds: float = 0.0
    leaves: Moment | None = None
    leaves_after: float = 0.5


@dataclass(slots=True)
class Reply:
    """Received part of a response. `longest_gap` is the longest time between two pieces of its body, in seconds."""

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
    """Return the bytes of a POST request with `connection: close`."""
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
    """Send a request. Return its response, or the part of it that precedes the client's disconnect.

    Raises:
        TimeoutError: the response did not end within `PATIENCE_SECONDS`.
        ConnectionError: the server closed the connection before the response was complete.
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
        raise ConnectionResetError(
            f"the server closed the connection after {len(reply.content)} bytes of the response body"
        )
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
    # The length of a response is not known in advance, so `leaves_after` is a share of a usual length of 8,000 bytes.
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
    """Callbacks of the httptools parser, which calls only the methods that exist."""

    def __init__(self, reply: Reply) -> None:
        self.on_header = reply.on_header
        self.on_body = reply.on_body
        self.on_message_complete = reply.on_message_complete
