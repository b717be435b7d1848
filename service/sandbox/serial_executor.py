"""Single-threaded work queue with limits on its length and on the wait in it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from service.protocol.errors import Overloaded

T = TypeVar("T")


class SerialExecutor:
    """Work queue of one thread, with limits on its length and on the wait in it.

    Args:
        things: plural noun for the queued work in error messages, such as "conversations".
        what: noun for what runs the work in error messages, such as "the chat template".
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
        """Run `work` in the thread and return its result. Raises Overloaded: the queue is full or the wait too long."""
        await self._wait()
        working = asyncio.get_running_loop().run_in_executor(self._thread, work)
        working.add_done_callback(lambda _: self._turn.release())
        # Cancelling the caller does not stop the thread, so the turn is released when the work is done.
        return await asyncio.shield(working)

    def close(self) -> None:
        """Cancel queued work and wait for the thread to end."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _wait(self) -> None:
        if self._num_waiting >= self._max_waiting:
            raise Overloaded(
                f"{self._num_waiting} {self._things} are queued for {self._what}; try again later",
                retry_after_seconds=self._wait_seconds,
            )
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._turn.acquire()
        except TimeoutError:
            raise Overloaded(
                f"{self._what} was busy with other {self._things} for {self._wait_seconds:g} s; try again later",
                retry_after_seconds=self._wait_seconds,
            ) from None
        finally:
            self._num_waiting -= 1
