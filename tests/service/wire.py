"""HTTP connection without a network: a test feeds bytes to the protocol and reads the bytes that it writes."""

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from service.http.connection import BoundedHttpProtocol, ConnectionLimits


class Wire(asyncio.Transport):
    """Transport that stores what the protocol writes. `num_unsent` is the size of a simulated send buffer in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.is_aborted = False
        self.num_unsent = 0

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def pause_reading(self) -> None:
        """Do nothing: the test may send bytes at any time."""

    def resume_reading(self) -> None:
        """Do nothing: the test may send bytes at any time."""


def connect(app: Any, state: ServerState, **bounds: Any) -> tuple[BoundedHttpProtocol, Wire]:
    """Return the protocol of a new connection, and its transport. Needs a running event loop."""
    wire = Wire()
    given: Any = {"limits": ConnectionLimits(), "count": lambda error: None, **bounds}
    protocol = BoundedHttpProtocol(Config(app, http=BoundedHttpProtocol, log_config=None), state, {}, **given)
    protocol.connection_made(wire)
    return protocol, wire
