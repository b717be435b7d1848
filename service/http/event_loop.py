"""Replacement of uvicorn's main loop that ticks once a second and can be woken.

uvicorn's own loop polls ten times a second for a request to exit.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

# Interval at which the Date header of responses changes.
_TICK_SECONDS = 1.0
# Tick number at which uvicorn renews the Date header.
_RENEWS_DATE = 0


class TickingServer(Protocol):
    """Interface of `uvicorn.Server` used here. Tests check it against uvicorn."""

    async def on_tick(self, counter: int) -> bool:
        """Do periodic work. Return True if the server is to exit."""
        ...

    async def main_loop(self) -> None:
        """Tick until the server is to exit."""
        ...


def slow_down_ticks(server: TickingServer, *, seconds: float = _TICK_SECONDS) -> Callable[[], None]:
    """Replace the main loop of a server before that loop starts.

    Returns:
        A function that causes a tick at once. Call it in the event loop.
    """
    woken = asyncio.Event()

    async def main_loop() -> None:
        while not await server.on_tick(_RENEWS_DATE):
            with suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), seconds)
            woken.clear()

    server.main_loop = main_loop  # type: ignore[method-assign]
    return woken.set
