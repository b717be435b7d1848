"""Probe that detects if a half-closed connection still has a reader, by sending the first bytes of the response.

A client that closes only its sending side (`nc -N`) waits for the response (RFC 9112, 9.6). A client that closes the
whole connection does not. TCP sends the same FIN for both. Only data shows the difference: the host of a closed
connection answers data with a reset, and the next write fails. Every response begins with the same nine bytes, for any
status. These bytes can be sent before the response is known, and the client sees no difference.
"""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_BEGINNING: Final = b"HTTP/1.1 "
# Longer than a round trip within a network. Each pause is four times the previous pause, so nine bytes last 219 s.
_FIRST_PAUSE_SECONDS: Final = 0.01
_PAUSE_GROWTH: Final = 4.0


class HalfCloseProbe(asyncio.Transport):
    """Transport of one response that has not begun: sends the first bytes of the response early, one at a time.

    Two bytes detect a closed connection. Four bytes detect one behind a TCP proxy that forwards half closes.

    Args:
        cycle: the request and its response. The cycle uses this transport until the response begins.
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
        """Write the beginning of the response, without the bytes that are already sent."""
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
        """Stop sending bytes early."""
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
