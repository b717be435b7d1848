"""Event loop with a virtual clock: a pause takes no real time, so that timing tests do not depend on the machine."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time()` jumps to the next timer when no callback is ready to run."""

    def __init__(self) -> None:
        self._seconds = 0.0
        super().__init__(_Selector(self._skip))

    def time(self) -> float:
        """Return the sum of all seconds that the loop has waited."""
        return self._seconds

    def _skip(self, seconds: float) -> None:
        self._seconds += seconds


class _Selector(selectors.DefaultSelector):
    def __init__(self, skip: Any) -> None:
        super().__init__()
        self._skip = skip

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:  # no timer is set: only a socket or another thread can wake the loop
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self._skip(timeout)
        return ready


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine like `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main)
