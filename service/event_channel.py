"""The way of events from the worker to the API process: a Unix socket that keeps messages whole.

LitServe's own transport takes each message through its queue process and through a thread of the API process: a third
of a millisecond of CPU, where a step of sixteen streams has half of one to spare. Here the worker writes, and the event
loop reads when the socket is ready, and hands the message over in the same turn: LitServe's reader, a task that would
have to be woken for each, waits for ever. Sequenced packets (unix(7)) are written whole or not at all: a worker that
dies while it writes leaves no half one, and what is too long for a packet is taken up from its beginning only.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import NoReturn

from litserve.transport.base import MessageTransport

# The kernel's usual room for what is under way (net.core.wmem_default) holds three of these.
_PACKET_BYTES = 2**16
_MAX_BUFFER_BYTES = 2**22
# The first byte of a packet.
_BEGINS, _ENDS = 1, 2
# How many packets of one message the event loop takes before it looks at its clients again.
_MAX_PACKETS_A_TURN = 16


class EventChannel(MessageTransport):  # type: ignore[misc]  # litserve has no types
    """LitServe's transport, with one consumer. It is made before the processes, each of which has both ends of it.

    Sending is thread-safe and waits while the socket is full; receiving belongs to one event loop. Workers send one
    after the other, never two at once.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reader.setblocking(False)
        self._writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BUFFER_BYTES)  # or what the kernel allows
        self._prepare()

    def __getstate__(self) -> tuple[socket.socket, socket.socket]:
        """What a new worker gets: the kernel passes the socket on."""
        return self._reader, self._writer

    def __setstate__(self, ends: tuple[socket.socket, socket.socket]) -> None:
        self._reader, self._writer = ends
        self._prepare()

    def _prepare(self) -> None:
        self._sending = threading.Lock()
        self._packet = memoryview(bytearray(1 + _PACKET_BYTES))
        self._gathered = bytearray()
        self._is_gathering = False
        self._receive: Callable[[bytes], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def send(self, item: bytes, consumer_id: int) -> None:
        """Have the API process receive it, after what was sent before.

        Raises:
            OSError: the channel is closed.
        """
        message = memoryview(item)
        with self._sending:
            for start in range(0, max(1, len(message)), _PACKET_BYTES):
                end = start + _PACKET_BYTES
                mark = (_BEGINS if start == 0 else 0) | (_ENDS if end >= len(message) else 0)
                self._writer.sendmsg((bytes((mark,)), message[start:end]))

    def deliver_to(self, receive: Callable[[bytes], None]) -> None:
        """Have each message taken by this call, which must not raise, in the event loop that is running."""
        self._receive, self._loop = receive, asyncio.get_running_loop()
        self._loop.add_reader(self._reader.fileno(), self._read)

    async def areceive(self, consumer_id: int, timeout: float | None = None, block: bool = True) -> NoReturn:
        """Where LitServe's reader waits, which gives neither a timeout nor `block`, until it is cancelled."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody has this future's result")

    def close(self, send_sentinel: bool = True) -> None:
        """End of sending and receiving in this process; the others have ends of their own."""
        if self._loop is not None:
            self._loop.remove_reader(self._reader.fileno())
        self._reader.close()
        self._writer.close()

    def _read(self) -> None:
        """Take a message, and hand it over. One whose end never came, of a worker that died, is dropped. For the next,
        and the rest of a long one, the event loop calls again."""
        for _ in range(_MAX_PACKETS_A_TURN):
            try:
                num_bytes = self._reader.recv_into(self._packet)
            except BlockingIOError:
                break
            mark = self._packet[0]
            if mark & _BEGINS:
                self._gathered.clear()
                self._is_gathering = True
            if not self._is_gathering:
                continue
            self._gathered += self._packet[1:num_bytes]
            if mark & _ENDS:
                self._is_gathering = False
                assert self._receive is not None
                self._receive(bytes(self._gathered))
                break
