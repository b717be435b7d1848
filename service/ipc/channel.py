"""Unix socket that carries events from the worker to the API process.

LitServe's own transport passes each message through its queue process and through a thread of the API process. That
costs about 0.33 ms of CPU per message; a step of 16 streams can spare 0.5 ms. Here the worker writes to the socket, and
the event loop reads the message and delivers it in the same iteration. LitServe's reader task is not used: it waits
forever. The socket uses sequenced packets (unix(7)), which are written whole or not at all. A worker that dies while it
writes therefore leaves no partial packet. A longer message is split into packets; its first packet is marked, so that
the reader drops a message whose beginning or end is missing.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import NoReturn

from litserve.transport.base import MessageTransport

# The default send buffer of a socket (net.core.wmem_default) holds three packets.
_PACKET_BYTES = 2**16
_MAX_BUFFER_BYTES = 2**22
# Flags in the first byte of a packet: the first packet of a message, and the last packet.
_BEGINS, _ENDS = 1, 2
# Packets of one message that are read before the event loop serves its other sockets again.
_MAX_PACKETS_A_TURN = 16


class EventChannel(MessageTransport):  # type: ignore[misc]  # litserve has no types
    """LitServe message transport with one consumer. Created before the processes; each process has both socket ends.

    `send` is thread-safe and blocks while the socket is full. One event loop receives. Only one worker sends at a time:
    a replacement sends after the worker that it replaces.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reader.setblocking(False)
        self._writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BUFFER_BYTES)  # the kernel caps this value
        self._prepare()

    def __getstate__(self) -> tuple[socket.socket, socket.socket]:
        """Return the two sockets, which multiprocessing passes to a new worker as file descriptors."""
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
        """Send a message to the API process. Messages arrive in the order of sending.

        Raises:
            OSError: the channel is closed.
        """
        message = memoryview(item)
        with self._sending:
            for start in range(0, max(1, len(message)), _PACKET_BYTES):
                end = start + _PACKET_BYTES
                flags = (_BEGINS if start == 0 else 0) | (_ENDS if end >= len(message) else 0)
                self._writer.sendmsg((bytes((flags,)), message[start:end]))

    def deliver_to(self, receive: Callable[[bytes], None]) -> None:
        """Call `receive` with each message, in the running event loop. `receive` must not raise."""
        self._receive, self._loop = receive, asyncio.get_running_loop()
        self._loop.add_reader(self._reader.fileno(), self._read)

    async def areceive(self, consumer_id: int, timeout: float | None = None, block: bool = True) -> NoReturn:
        """Wait until cancelled. LitServe's reader task calls this; messages arrive by `deliver_to` instead."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("this future never gets a result")

    def close(self, send_sentinel: bool = True) -> None:
        """Stop sending and receiving in this process. Other processes have their own socket ends."""
        if self._loop is not None:
            self._loop.remove_reader(self._reader.fileno())
        self._reader.close()
        self._writer.close()

    def _read(self) -> None:
        """Read one message and deliver it. The event loop calls again for the next message or the rest of a long one.

        An unfinished message of a dead worker is dropped.
        """
        for _ in range(_MAX_PACKETS_A_TURN):
            try:
                num_bytes = self._reader.recv_into(self._packet)
            except BlockingIOError:
                break
            flags = self._packet[0]
            if flags & _BEGINS:
                self._gathered.clear()
                self._is_gathering = True
            if not self._is_gathering:
                continue
            self._gathered += self._packet[1:num_bytes]
            if flags & _ENDS:
                self._is_gathering = False
                assert self._receive is not None
                self._receive(bytes(self._gathered))
                break
