"""Engine client that records the commands it sends and the callbacks it calls."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

from service.admission.controller import Admission
from service.ipc.messages import Command, Submit, WorkerReady
from service.ipc.shared_state import WorkerState
from service.requests.dispatcher import Dispatcher
from service.requests.engine_client import EngineClient
from service.requests.engine_worker import EngineWorker
from service.requests.inflight import Choice, InflightRequest
from tests.service.sequences import make_request


class FakeWorker(EngineWorker):
    """Worker whose commands go to a function."""

    def __init__(self, take: Callable[[Sequence[Command]], None], index: int = 0) -> None:
        super().__init__(cast(Any, SimpleNamespace(discard_unsent=lambda: None)), WorkerState(), index)
        self.take = take

    def send(self, commands: Sequence[Command]) -> None:
        if commands:
            self.take(commands)


def fake_workers(take: Callable[[Sequence[Command]], None]) -> dict[str, Any]:
    """Return the arguments of an engine client with one worker whose commands go to a function."""
    workers = [FakeWorker(take)]
    return {"workers": workers, "dispatcher": Dispatcher(workers)}


class Desk:
    """Engine client, with the commands that it has sent and the arguments of its callbacks."""

    def __init__(self, *, waiting: int = 10, workers: Sequence[FakeWorker] = (), block_size: int | None = None) -> None:
        self.sent: list[Command] = []
        self.workers = workers or [FakeWorker(self._send)]
        self.hellos: list[WorkerReady] = []
        self.outcomes: list[str] = []
        self.late: list[int] = []
        self.admission = Admission(
            max_num_running=2, max_waiting_requests=waiting, max_waiting_tokens=10_000, num_workers=len(self.workers)
        )
        self.engine_client = EngineClient(
            workers=self.workers,
            dispatcher=Dispatcher(self.workers, block_size),
            admission=self.admission,
            on_worker_ready=lambda hello, worker: self.hellos.append(hello),
            on_engine=lambda event, worker: None,
            on_replay=self.outcomes.append,
            on_late=self.late.append,
            on_count=lambda number: None,
        )

    def _send(self, commands: Sequence[Command]) -> None:
        self.sent += commands

    def submit(self, *choices: Choice) -> InflightRequest:
        request = make_request(*choices)
        self.engine_client.submit(request)
        return request

    def submits(self) -> list[Submit]:
        return [command for command in self.sent if isinstance(command, Submit)]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


async def texts(request: InflightRequest) -> list[tuple[int, str]]:
    return [(choice.index, delta.text) for choice, delta in await request.next_deltas()]
