"""uvicorn's main loop, once a second: its own looks ten times a second whether it should end, here it is woken."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

# As often as the Date field of answers changes.
_TICK_SECONDS = 1.0
# Of a tick of this number uvicorn renews that field.
_RENEWS_DATE = 0


class Ticking(Protocol):
    """What this knows of `uvicorn.Server`. Tests hold it against uvicorn's."""

    async def on_tick(self, counter: int) -> bool:
        """Do what is due. Whether the server is to end."""
        ...

    async def main_loop(self) -> None:
        """Tick until it is."""
        ...


def tick_seldom(server: Ticking, *, seconds: float = _TICK_SECONDS) -> Callable[[], None]:
    """Replace the main loop of a server that has not begun it.

    Returns what makes it tick at once. It is to be called in the event loop.
    """
    woken = asyncio.Event()

    async def main_loop() -> None:
        while not await server.on_tick(_RENEWS_DATE):
            with suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), seconds)
            woken.clear()

    server.main_loop = main_loop  # type: ignore[method-assign]
    return woken.set
