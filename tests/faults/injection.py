"""Faults of a server's processes, injected in shuffled order at random times."""

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import psutil

from tests.e2e.process import Service, alive

# The server exits at the sixth death of a worker within a minute.
_MOST_DEATHS, _MINUTE = 4, 61.0
# The server starts no further standby after three deaths of a standby.
_MOST_STANDBYS = 2
HANG_SECONDS = 4.0
FLAGS = ("--hang-seconds", str(HANG_SECONDS))


@dataclass(frozen=True, slots=True)
class Fault:
    """Kind of fault.

    num_deaths: worker processes that die by the fault.
    """

    name: str
    num_deaths: int
    inject: Callable[[Service, random.Random], Awaitable[bool]]  # returns False if there is no such process


@dataclass(frozen=True, slots=True)
class Event:
    """Injected fault. Times are `time.monotonic()` seconds."""

    name: str
    num_deaths: int
    began: float
    ended: float


def named(service: Service, name: str) -> list[psutil.Process]:
    """Return the server's processes with this name, or with this word in their command line."""
    found = []
    for child in service.children:
        with suppress(psutil.NoSuchProcess):
            if child.name() == name or any(name in word for word in child.cmdline()):
                found.append(child)
    return found


async def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
    while alive([process]):
        await asyncio.sleep(0.01)


async def _found(find: Callable[[Service], psutil.Process], service: Service) -> psutil.Process:
    """Wait until the process exists, and return it."""
    while True:
        with suppress(psutil.NoSuchProcess, ValueError):
            return find(service)
        await asyncio.sleep(0.02)


async def _another_worker(service: Service, last: psutil.Process) -> psutil.Process:
    while True:
        for worker in named(service, "kvasir-worker"):
            if worker.pid != last.pid:
                return worker
        await asyncio.sleep(0.02)


def _worker(service: Service) -> psutil.Process:
    return service.worker


async def _kill_worker(service: Service, choose: random.Random) -> bool:
    worker = await _found(_worker, service)
    await _kill(worker)
    await _another_worker(service, worker)
    return True


async def _kill_two_workers(service: Service, choose: random.Random) -> bool:
    """Kill the worker, and its replacement within a second of its start."""
    worker = await _found(_worker, service)
    await _kill(worker)
    second = await _another_worker(service, worker)
    await asyncio.sleep(choose.uniform(0.0, 1.0))
    await _kill(second)
    await _another_worker(service, second)
    return True


async def _hang_worker(service: Service, choose: random.Random) -> bool:
    """Stop the worker until main kills it."""
    worker = await _found(_worker, service)
    worker.suspend()
    await _another_worker(service, worker)
    return True


def _stop(find: Callable[[Service], psutil.Process], most_seconds: float) -> Callable[..., Awaitable[bool]]:
    async def stop(service: Service, choose: random.Random) -> bool:
        process = await _found(find, service)
        process.suspend()
        try:
            await asyncio.sleep(choose.uniform(0.1, most_seconds))
        finally:
            process.resume()
        return True

    return stop


def _kill_all(*names: str) -> Callable[..., Awaitable[bool]]:
    async def kill(service: Service, choose: random.Random) -> bool:
        found = [process for name in names for process in named(service, name)]
        for process in found:
            await _kill(process)
        return bool(found)

    return kill


KILL, KILL_TWO, HANG = "worker killed", "worker killed twice in a row", "worker stopped for good"
STANDBY = "standby killed"
FAULTS = (
    Fault(KILL, 1, _kill_worker),
    Fault(KILL_TWO, 2, _kill_two_workers),
    Fault(HANG, 1, _hang_worker),
    Fault("worker stopped for a while", 0, _stop(_worker, HANG_SECONDS / 3)),
    Fault("API process stopped for a while", 0, _stop(lambda service: service.api, 1.5)),
    Fault("template process killed", 0, _kill_all("template_process")),
    Fault("grammar process killed", 0, _kill_all("service.structured_output.compiler_process")),
    Fault(STANDBY, 0, _kill_all("kvasir-importer", "kvasir-standby")),
)


class Injection:
    """Injection of faults into one server, one after the other.

    Args:
        more: faults besides `FAULTS`, such as floods of requests.
        mean_seconds: mean time between two faults.
    """

    def __init__(
        self, service: Service, choose: random.Random, *, more: Sequence[Fault] = (), mean_seconds: float
    ) -> None:
        self._service = service
        self._choose = choose
        self._faults = (*FAULTS, *more)
        self._mean_seconds = mean_seconds
        self._deaths: deque[float] = deque()
        self.events: list[Event] = []

    @property
    def counts(self) -> Counter[str]:
        return Counter(event.name for event in self.events)

    @property
    def num_deaths(self) -> int:
        return sum(event.num_deaths for event in self.events)

    async def run(self, until: float) -> None:
        """Inject faults until a monotonic time, each fault at least once. Return after the end of the last fault."""
        deck = self._choose.sample(self._faults, len(self._faults))
        num_dealt = 0
        while num_dealt < len(self._faults) or time.monotonic() < until:
            await asyncio.sleep(min(self._choose.expovariate(1 / self._mean_seconds), 3 * self._mean_seconds))
            if not deck:
                deck = self._choose.sample(self._faults, len(self._faults))
            fault, num_dealt = deck.pop(), num_dealt + 1
            if self._may(fault):
                await self._inject(fault)

    def _may(self, fault: Fault) -> bool:
        while self._deaths and self._deaths[0] < time.monotonic() - _MINUTE:
            self._deaths.popleft()
        is_enough = fault.name == STANDBY and self.counts[STANDBY] >= _MOST_STANDBYS
        return not is_enough and len(self._deaths) + fault.num_deaths <= _MOST_DEATHS

    async def _inject(self, fault: Fault) -> None:
        began = time.monotonic()
        if await fault.inject(self._service, self._choose):
            self.events.append(Event(fault.name, fault.num_deaths, began, time.monotonic()))
            self._deaths.extend([time.monotonic()] * fault.num_deaths)

    def explains(self, began: float, ended: float) -> bool:
        """Return whether a worker died between two times."""
        return any(event.num_deaths and event.began <= ended and began <= event.ended for event in self.events)


@asynccontextmanager
async def watched(service: Service, seen: dict[int, psutil.Process]) -> AsyncIterator[None]:
    """Note every process that belongs to the server, by pid, while the block runs."""

    async def look() -> None:
        while True:
            seen.update({child.pid: child for child in service.children})
            await asyncio.sleep(0.25)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
