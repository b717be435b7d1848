"""Admission with the default settings in front of a simulated engine: bursts and overload, in virtual time."""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from starlette.requests import Request

from service.admission.controller import Admission, QueuePolicy, read_queue_policy
from service.config.settings import ServeSettings
from service.protocol.errors import Overloaded
from tests.service.virtual_time import run

NUM_COMPLETION_TOKENS, NUM_TOKENS = 128, 140  # with the prompt
NUM_SDK_ATTEMPTS = 3
DEFAULTS = ServeSettings(checkpoint=Path("nowhere"))
UNLIMITED = DEFAULTS.model_copy(
    update={
        "max_waiting_requests": 10**6,
        "max_waiting_tokens": 10**9,
        "target_queue_seconds": 0.0,
        "max_queue_seconds": 0.0,
    }
)


@dataclass(eq=False)
class Sequence:
    """Admitted sequence of the simulation. `is_complete` becomes False if it waited longer than its timeout."""

    terms: QueuePolicy
    arrival_seconds: float
    num_remaining: int = NUM_COMPLETION_TOKENS
    is_complete: asyncio.Future[bool] = field(default_factory=asyncio.Future)


class Server:
    """Admission and a simulated engine: a step takes `step_seconds` and computes one token per running sequence."""

    def __init__(self, settings: ServeSettings, step_seconds: float) -> None:
        self.settings = settings
        self.step_seconds = step_seconds
        self.clock = asyncio.get_running_loop().time
        self.admission = Admission(
            max_num_running=settings.max_num_running,
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
            clock=self.clock,
            draw=random.Random(1).random,
        )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.statuses: list[int] = []  # of each response
        self.wait_seconds: list[float] = []  # of each sequence that began

    async def respond(self, headers: Mapping[str, str]) -> float | None:
        """Serve a request. Return None if it was completed, else the Retry-After in seconds."""
        written = [(name.encode(), value.encode()) for name, value in headers.items()]
        request = Request({"type": "http", "headers": written, "client": ("10.0.0.1", 1), "state": {}})
        terms = read_queue_policy(request, None, self.settings)
        try:
            self.admission.reject_by_headers(terms)
            self.admission.admit([NUM_TOKENS], terms)
        except Overloaded as error:
            self.statuses.append(error.status)
            return error.retry_after_seconds
        self.waiting.append(sequence := Sequence(terms, self.clock()))
        is_complete = await sequence.is_complete
        self.statuses.append(200 if is_complete else 408)
        return None if is_complete else self.admission.retry_after([NUM_TOKENS], terms)

    async def work(self) -> None:
        """Compute steps for ever."""
        while True:
            now = self.clock()
            for sequence in [each for each in self.waiting if (each.terms.deadline(each.arrival_seconds) or now) < now]:
                self.waiting.remove(sequence)
                self.start(sequence)
                self.end(sequence, is_complete=False)
            num_free = self.settings.max_num_running - len(self.running)
            begun = [self.waiting.popleft() for _ in range(min(len(self.waiting), num_free))]
            await asyncio.sleep(self.step_seconds)
            self.running += begun
            for sequence in begun:
                self.wait_seconds.append(self.clock() - sequence.arrival_seconds)
                self.start(sequence)
            for sequence in list(self.running):
                sequence.num_remaining -= 1
                if not sequence.num_remaining:
                    self.running.remove(sequence)
                    self.end(sequence, is_complete=True)

    def start(self, sequence: Sequence) -> None:
        self.admission.started(NUM_TOKENS, sequence.terms.tenant)

    def end(self, sequence: Sequence, *, is_complete: bool) -> None:
        self.admission.ended(sequence.terms.tenant)
        sequence.is_complete.set_result(is_complete)


async def call_by_sdk(server: Server) -> bool:
    """Send a request as OpenAI's SDK does, with at most two retries. Return False if it raises an exception."""
    for attempt in range(NUM_SDK_ATTEMPTS):
        seconds = await server.respond({"x-stainless-retry-count": str(attempt), "x-stainless-read-timeout": "600"})
        if seconds is None:
            return True
        await asyncio.sleep(seconds)
    return False


async def call_once(server: Server) -> bool:
    """Send a request that is never retried. Return False if the server does not complete it."""
    return await server.respond({}) is None


Call = Callable[[Server], Coroutine[None, None, bool]]


@dataclass(frozen=True)
class Burst:
    """Result of a burst: its completed calls, its seconds, and its server."""

    num_completed: int
    seconds: float
    server: Server


async def burst(
    settings: ServeSettings, call: Call, num_clients: int, step_seconds: float, gap_seconds: float
) -> Burst:
    """Start `num_clients` calls, `gap_seconds` apart, since one process reads all requests."""
    server = Server(settings, step_seconds)
    work = asyncio.create_task(server.work())
    began, calls = server.clock(), []
    for _ in range(num_clients):
        calls.append(asyncio.create_task(call(server)))
        await asyncio.sleep(gap_seconds)
    num_completed = sum(await asyncio.gather(*calls))
    work.cancel()
    return Burst(num_completed, server.clock() - began, server)


@pytest.mark.parametrize("num_clients", [65, 256, 512, 1000])
@pytest.mark.parametrize(
    ("step_seconds", "gap_seconds"), [(0.008, 0.0003), (0.008, 0.001), (0.032, 0.003), (0.064, 0.001)]
)
def test_a_burst_of_sdk_clients_ends_without_an_exception_as_soon_as_with_an_unlimited_queue(
    num_clients: int, step_seconds: float, gap_seconds: float
) -> None:
    """With 0.064 s per step, the last of 1,000 clients would wait two minutes, longer than --max-queue-seconds."""

    async def check() -> None:
        limited = await burst(DEFAULTS, call_by_sdk, num_clients, step_seconds, gap_seconds)
        unlimited = await burst(UNLIMITED, call_by_sdk, num_clients, step_seconds, gap_seconds)
        assert limited.num_completed == unlimited.num_completed == num_clients
        assert limited.seconds <= 1.1 * unlimited.seconds

    run(check())


@pytest.mark.parametrize(("step_seconds", "gap_seconds"), [(0.008, 0.0003), (0.008, 0.001), (0.016, 0.002)])
def test_a_burst_of_1000_clients_that_never_retry_is_completed(step_seconds: float, gap_seconds: float) -> None:
    """In the second and third case, the last clients arrive while the first sequences end."""

    async def check() -> None:
        found = await burst(DEFAULTS, call_once, 1000, step_seconds, gap_seconds)
        assert found.server.statuses == [200] * 1000

    run(check())


def test_waits_are_bounded_by_the_target_and_slots_stay_full_at_four_times_the_capacity() -> None:
    """64 slots, 128 steps per completion and 32 ms per step: 15.6 requests per second. 0.016 s apart: 62.5."""

    async def check() -> None:
        found = await burst(DEFAULTS, call_once, 8000, 0.032, 0.016)
        capacity = DEFAULTS.max_num_running / NUM_COMPLETION_TOKENS / 0.032
        assert set(found.server.statuses) == {200, 429}
        assert found.num_completed >= 0.95 * capacity * found.seconds
        assert (
            DEFAULTS.target_queue_seconds / 2 <= max(found.server.wait_seconds) <= 1.25 * DEFAULTS.target_queue_seconds
        )

    run(check())
