"""Who is replaced by whom, and when the service ends instead."""

import os
from multiprocessing.connection import Connection
from typing import Any

import pytest

from service.lifecycle import Lifecycle, Phase
from service.metrics import Metrics
from service.supervision import Supervisor


class FakeProcess:
    def __init__(self, exitcode: int | None = None) -> None:
        self.exitcode = exitcode
        self.pid = 2**22 + 1

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self.exitcode = -9

    def join(self) -> None:
        assert self.exitcode is not None


class Bench:
    """A supervisor, whom it has started for which epoch, and what ended the service."""

    def __init__(self, metrics: Metrics, *, has_standby: bool = True, hang_seconds: float = 0.0) -> None:
        self.lifecycle = Lifecycle(main_pid=os.getpid())
        self.lifecycle.phase.value = Phase.SERVING
        self.lifecycle.ready_epoch.value = 0
        self.launched: list[tuple[int, bool]] = []  # epoch, and whether it waits for a word
        self.failures: list[str] = []
        self.error: OSError | None = None
        self.worker: Any = FakeProcess()
        self.supervisor = Supervisor(
            self.lifecycle,
            metrics,
            launch=self._launch,
            fail=self.failures.append,
            has_standby=has_standby,
            hang_seconds=hang_seconds,
        )

    def _launch(self, epoch: int, word: Connection | None = None) -> Any:
        if self.error is not None:
            raise self.error
        self.launched.append((epoch, word is not None))
        process: Any = FakeProcess()
        process.epoch = epoch
        process.word = None if word is None else Connection(os.dup(word.fileno()), writable=False)
        return process

    def watch(self, api: FakeProcess | None = None, queue: FakeProcess | None = None) -> None:
        others: Any = (FakeProcess() if api is None else api, FakeProcess() if queue is None else queue)
        self.supervisor.watch(api=others[0], queue=others[1], worker=lambda: self.worker)

    def die(self) -> None:
        self.worker.kill()
        self.worker = self.supervisor.replace(self.worker)


@pytest.fixture
def bench(metrics: Metrics) -> Bench:
    return Bench(metrics)


def test_the_standby_becomes_the_worker_and_another_one_waits(bench: Bench) -> None:
    bench.watch()
    bench.watch()
    assert bench.launched == [(1, True)]
    bench.die()
    assert bench.worker.word.recv_bytes() == b"begin"
    assert (bench.worker.epoch, bench.lifecycle.epoch.value) == (1, 1)
    bench.watch()
    assert bench.launched == [(1, True)], "not before the worker is up: it needs the processors"
    bench.lifecycle.ready_epoch.value = 1
    bench.watch()
    assert bench.launched == [(1, True), (2, True)]
    bench.supervisor.end()


def test_without_a_standby_a_worker_is_started(metrics: Metrics) -> None:
    bench = Bench(metrics, has_standby=False)
    bench.watch()
    bench.die()
    bench.die()
    assert bench.launched == [(1, False), (2, False)]


def test_a_standby_that_is_dead_when_it_is_needed_is_replaced_by_a_worker(bench: Bench) -> None:
    bench.watch()
    bench.supervisor._standby._process.kill()  # type: ignore[union-attr]
    bench.die()
    assert bench.launched == [(1, True), (1, False)]


def test_where_no_worker_can_be_started_the_service_ends(bench: Bench) -> None:
    bench.error = BlockingIOError(11, "Resource temporarily unavailable")
    dead = bench.worker
    bench.die()
    assert bench.worker is dead
    assert bench.failures == ["no other worker can be started: [Errno 11] Resource temporarily unavailable"]


def test_a_worker_that_hangs_is_killed(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(metrics, hang_seconds=5.0)
    bench.watch()
    assert bench.worker.is_alive()
    monkeypatch.setattr(bench.supervisor._watchdog, "barks", lambda: True)
    bench.watch()
    assert not bench.worker.is_alive()
    assert bench.failures == []


def test_without_the_api_process_or_the_queue_process_the_service_ends(bench: Bench) -> None:
    bench.watch(api=FakeProcess(-11))
    bench.watch(queue=FakeProcess(1))
    assert bench.failures == ["the API process was killed by SIGSEGV", "the queue process ended with exit code 1"]


def test_what_dies_at_the_end_is_left_alone(bench: Bench) -> None:
    bench.lifecycle.phase.value = Phase.STOPPING
    dead = bench.worker
    bench.die()
    bench.watch(api=FakeProcess(-9))
    assert bench.worker is dead
    assert (bench.launched, bench.failures) == ([], [])


def test_the_end_leaves_no_standby(bench: Bench) -> None:
    bench.watch()
    standby = bench.supervisor._standby._process
    assert standby is not None
    bench.supervisor.end()
    bench.watch()
    assert not standby.is_alive()
    assert len(bench.launched) == 1
