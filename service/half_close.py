"""Probe whether a client that has closed its sending side still reads, by the first bytes of its answer.

A client that closes its sending side alone (`nc -N`) waits for its answer (RFC 9112, 9.6); one that closes the whole
connection does not. TCP announces both by the same FIN. Only data tells them apart: the host of a closed connection
answers data with a reset, and the next write fails. Every answer begins with the same nine bytes, whatever its status,
so that they can be sent before the answer is known, and no client sees a difference.
"""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_BEGINNING: Final = b"HTTP/1.1 "
# A round trip within a network is shorter. Each pause is four times the one before it: nine bytes last 219 s.
_FIRST_PAUSE_SECONDS: Final = 0.01
_PAUSE_GROWTH: Final = 4.0


class EarlyBeginning(asyncio.Transport):
    """Transport of one answer that has not begun: it sends the answer's first bytes ahead, one at a time.

    Two bytes notice a closed connection, four notice one behind a TCP proxy that passes half closes on.

    Args:
        cycle: the request and its answer. Its transport is this one until the answer begins.
    """

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._cycle = cycle
        self._loop = loop
        self._transport = cycle.transport
        self._num_sent = 0
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        cycle.transport = self
        self._probe()

    def write(self, data: Any) -> None:
        """Write the beginning of the answer, without the bytes that are sent already."""
        self.stop()
        self._cycle.transport = self._transport
        self._transport.write(data[self._num_sent :])

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def is_closing(self) -> bool:
        """Return True once the connection is closed or lost."""
        return self._transport.is_closing()

    def stop(self) -> None:
        """Send no more bytes ahead."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _probe(self) -> None:
        if self._num_sent == len(_BEGINNING) or self._transport.is_closing():
            return
        self._transport.write(_BEGINNING[self._num_sent : self._num_sent + 1])
        self._num_sent += 1
        self._timer = self._loop.call_later(self._pause_seconds, self._probe)
        self._pause_seconds *= _PAUSE_GROWTH
