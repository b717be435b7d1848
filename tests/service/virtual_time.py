"""An event loop whose clock goes forward only when nothing else is left to do: pauses take no time, and no machine is
too slow for what is written with them."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` jumps to what is due next as soon as everything that was due is done."""

    def __init__(self) -> None:
        self._seconds = 0.0
        super().__init__(_Selector(self._skip))

    def time(self) -> float:
        """Seconds that were waited for, in all."""
        return self._seconds

    def _skip(self, seconds: float) -> None:
        self._seconds += seconds


class _Selector(selectors.DefaultSelector):
    def __init__(self, skip: Any) -> None:
        super().__init__()
        self._skip = skip

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:  # nothing is due ever: another thread has the next word
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self._skip(timeout)
        return ready


def run(main: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main)
