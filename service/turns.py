"""Work that is done one piece at a time, in a thread of its own, and who waits for it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from service.errors import Overloaded

T = TypeVar("T")


class Turns:
    """A queue before one thread. A piece of work that hangs holds up the others, for a bounded time, and nobody else.

    Args:
        things: what waits, in the plural; what: what it waits for. Both are for who is told to come back.
        max_waiting: how many may wait for their turn.
        wait_seconds: how long each may.
    """

    def __init__(self, things: str, what: str, *, max_waiting: int, wait_seconds: float) -> None:
        self._things = things
        self._what = what
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=what.replace(" ", "-"))
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._max_waiting = max_waiting
        self._wait_seconds = wait_seconds

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` gives, computed in the thread.

        Raises:
            Overloaded: too many wait for their turn, or this one did for too long.
        """
        await self._wait()
        working = asyncio.get_running_loop().run_in_executor(self._thread, work)
        working.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(working)  # who leaves does not end it: the thread is busy until it is done

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _wait(self) -> None:
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(
                f"{self._num_waiting} {self._things} wait for {self._what}", retry_after_seconds=self._wait_seconds
            )
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded(
                f"{self._what} was busy with other {self._things} for {self._wait_seconds:g} s",
                retry_after_seconds=self._wait_seconds,
            ) from None
        finally:
            self._num_waiting -= 1
