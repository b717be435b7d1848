"""Unix socket that carries commands from the API process to the worker, and events from the worker back.

The socket uses sequenced packets (unix(7)), which are written whole or not at all, even by a process that is killed.
A long message is split into packets. The first and the last packet are marked, so that the reader drops a message of
which a part is missing.
"""

import asyncio
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator

# The default send buffer of a socket (net.core.wmem_default) holds three packets.
_PACKET_BYTES = 2**16
_MAX_BUFFER_BYTES = 2**22
# Flags in the first byte of a packet: the first packet of a message, and the last packet.
_BEGINS, _ENDS = 1, 2
_RETRY_SECONDS = 0.01
# Packets that one call of `read` reads, so that the event loop serves its other sockets between two calls.
_MAX_PACKETS_A_TURN = 16


class Channel:
    """Socket pair between the API process and the worker. The methods use the API process's end of the pair.

    Main keeps `worker_end` open and passes it to each worker. Only one worker uses it at a time: a replacement worker
    begins after the worker that it replaces has died.
    """

    def __init__(self) -> None:
        self._socket, self.worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._socket, self.worker_end):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BUFFER_BYTES)  # the kernel caps this value
        self._events = _MessageReader(self._socket)
        self._unsent: deque[list[bytes | memoryview]] = deque()
        self._is_full = False
        self._deliver: Callable[[bytes], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, message: bytes) -> None:
        """Send a message to the worker without blocking. Packets that do not fit into the socket are queued."""
        self._unsent.extend(_packets(message))
        if not self._is_full:
            self._flush()

    def discard_unsent(self) -> None:
        """Drop the packets that are queued in the API process, because the worker that they are for has died."""
        self._unsent.clear()

    def _flush(self) -> None:
        if self._is_full:
            asyncio.get_running_loop().remove_writer(self._socket.fileno())
            self._is_full = False
        while self._unsent:
            try:
                self._socket.sendmsg(self._unsent[0], (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._is_full = True
                asyncio.get_running_loop().add_writer(self._socket.fileno(), self._flush)
                return
            except OSError:  # the kernel has no memory for the packet now
                self._is_full = True
                asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._flush)
                return
            self._unsent.popleft()

    def deliver_to(self, deliver: Callable[[bytes], None]) -> None:
        """Let the running event loop call `deliver` with each message from a worker. `deliver` must not raise."""
        self._deliver, self._loop = deliver, asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)

    def _read(self) -> None:
        if (message := self._events.read()) is not None:
            assert self._deliver is not None
            self._deliver(message)

    def close(self) -> None:
        """Close both ends of the socket in this process. Other processes have their own copies of the ends."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        for end in (self._socket, self.worker_end):
            end.close()


class WorkerChannel:
    """Worker's end of the channel to the API process."""

    def __init__(self, worker_end: socket.socket) -> None:
        self._socket = worker_end
        self._commands = _MessageReader(worker_end)
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(worker_end.fileno(), select.POLLIN)

    def send(self, message: bytes) -> None:
        """Send a message to the API process. Thread-safe; blocks while the socket is full.

        Raises:
            OSError: the channel is closed.
        """
        with self._sending:
            for packet in _packets(message):
                self._socket.sendmsg(packet)

    def receive(self, timeout_seconds: float) -> bytes | None:
        """Return the next message from the API process; None if no message is complete within the timeout."""
        message = self._commands.read()
        if message is None and timeout_seconds > 0.0:
            self._poll.poll(1000.0 * timeout_seconds)
            message = self._commands.read()
        return message


class _MessageReader:
    """Non-blocking reader that joins the packets of a socket into messages."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._packet = memoryview(bytearray(1 + _PACKET_BYTES))
        self._gathered = bytearray()
        self._is_gathering = False

    def read(self) -> bytes | None:
        """Read the packets in the socket. Return the message that they complete, None if no message is complete."""
        for _ in range(_MAX_PACKETS_A_TURN):
            try:
                num_bytes = self._source.recv_into(self._packet, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            flags = self._packet[0]
            if flags & _BEGINS:
                self._gathered.clear()
                self._is_gathering = True
            if not self._is_gathering:
                continue
            self._gathered += self._packet[1:num_bytes]
            if flags & _ENDS:
                self._is_gathering = False
                return bytes(self._gathered)
        return None


def _packets(message: bytes) -> Iterator[list[bytes | memoryview]]:
    """Split a message into packets. Yield each packet as two buffers for `sendmsg`: one byte of flags, and content."""
    view = memoryview(message)
    for start in range(0, max(1, len(view)), _PACKET_BYTES):
        end = start + _PACKET_BYTES
        flags = (_BEGINS if start == 0 else 0) | (_ENDS if end >= len(view) else 0)
        yield [bytes((flags,)), view[start:end]]
