"""HTTP/1.1 client with one socket per request, which can send and read slowly and disconnect at any stage."""

import asyncio
import json
import random
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from loadtest.client import http1
from loadtest.client.http1 import AT_ONCE, Pace, ResponseReader

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
    pace: speed at which the response is read.
    leaves: stage at which the client disconnects; None if it reads the whole response.
    leaves_after: share of the head, body or response before the disconnect; for `Moment.ASKED`, seconds.
    """

    num_drops: int = 1
    pace: Pace = AT_ONCE
    leaves: Moment | None = None
    leaves_after: float = 0.5


class Reply(ResponseReader):
    """Received part of a response, read as the load test reads one. Times are `time.monotonic()` seconds.

    piece_seconds: arrival time of each piece of the body.
    """

    def __init__(self) -> None:
        super().__init__(time.monotonic())
        self.content = bytearray()
        self.began = self.ended = self.now
        self.piece_seconds: list[float] = []

    @property
    def text(self) -> str:
        return self.content.decode()

    def on_body(self, body: bytes) -> None:
        self.piece_seconds.append(self.now)
        self.content += body


def request_bytes(path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a POST request with `connection: close`."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return http1.request_bytes(path, content, {"host": "kvasir", "connection": "close", **(headers or {})})


async def exchange(port: int, sent: bytes, reading: Reading, choose: random.Random) -> Reply:
    """Send a request. Return its response, or the part of it that precedes the client's disconnect.

    Raises:
        TimeoutError: the response did not end within `PATIENCE_SECONDS`.
        ConnectionError: the server closed the connection before the response was complete.
    """
    reply = Reply()
    async with asyncio.timeout(PATIENCE_SECONDS):
        connection = socket.socket()
        connection.setblocking(False)
        reading.pace.prepare(connection)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=reading.pace.num_bytes)
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
    if reading.leaves is Moment.ASKED:
        await asyncio.sleep(reading.leaves_after)
        return
    # The length of a response is not known in advance, so `leaves_after` is a share of a usual length of 8,000 bytes.
    enough = reading.leaves_after * 8000 if reading.leaves is Moment.ANSWERED else float("inf")
    while not reply.is_complete and len(reply.content) < enough:
        piece = await reader.read(reading.pace.num_bytes)
        if not piece:
            return
        reply.feed(piece, time.monotonic())
        if reading.pace.pause_seconds:
            await asyncio.sleep(reading.pace.pause_seconds)
