"""Who is replaced by whom, and when the service ends instead."""

import os
import threading
from functools import partial
from multiprocessing.connection import Connection
from socket import socketpair
from typing import Any

import pytest

from service.ipc.shared_state import Lifecycle, Phase
from service.supervisor.supervisor import Supervisor, failed_start
from service.worker.worker import EXIT_SETTINGS, EXIT_START_FAILED


class FakeProcess:
    """A process whose end can be waited for, as the kernel tells of it."""

    def __init__(self, exitcode: int | None = None) -> None:
        self.exitcode = exitcode
        self.pid = 2**22 + 1
        self._ours, self._theirs = socketpair()
        self.sentinel = self._ours.fileno()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self.exitcode = -9
        self._theirs.close()

    def __del__(self) -> None:
        self._ours.close()
        self._theirs.close()

    def join(self) -> None:
        assert self.exitcode is not None


@pytest.mark.parametrize(
    ("ended", "said", "code"),
    [
        (EXIT_START_FAILED, "", 1),
        (EXIT_SETTINGS, "", 2),
        (-9, "the worker was killed by SIGKILL (out of memory?) while starting", 1),
        (1, "the worker ended with exit code 1 while starting", 1),
    ],
)
def test_a_start_that_failed(ended: int, said: str, code: int) -> None:
    worker: Any = FakeProcess(ended)
    error = failed_start(worker)
    assert (str(error), error.exit_code) == (said, code)


class Bench:
    """A supervisor, whom it has started for which epoch, and what ended the service."""

    def __init__(self, *, has_standby: bool = True, hang_seconds: float = 0.0) -> None:
        self.lifecycle = Lifecycle(main_pid=os.getpid())
        self.lifecycle.phase.value = Phase.SERVING
        self.lifecycle.ready_epoch.value = 0
        self.launched: list[tuple[int, bool]] = []  # epoch, and whether it waits for a word
        self.failures: list[str] = []
        self.now = 100.0
        self.api: Any = FakeProcess()
        self.error: OSError | None = None
        self.worker: Any = FakeProcess()
        self.supervisor = Supervisor(
            self.lifecycle,
            launch=self._launch,
            fail=self._fail,
            has_standby=has_standby,
            hang_seconds=hang_seconds,
            clock=lambda: self.now,
        )

    def _fail(self, message: str, hung: Any = None) -> None:
        self.failures.append(message)
        if hung is not None:
            hung.kill()

    def _launch(self, epoch: int, word: Connection | None = None) -> Any:
        if self.error is not None:
            raise self.error
        self.launched.append((epoch, word is not None))
        process: Any = FakeProcess()
        process.epoch = epoch
        process.word = None if word is None else Connection(os.dup(word.fileno()))
        if process.word is not None:
            process.word.send_bytes(b"imported")
        return process

    def watch(self, api: Any = None) -> None:
        self.supervisor.watch(api=api or self.api, worker=lambda: self.worker)

    def watch_for(self, seconds: float, *beating: str) -> None:
        """Look ten times a second for so long, while these give signs of life, until one is killed."""
        until = self.now + seconds
        while self.now < until and self.worker.is_alive() and self.api.is_alive():
            self.now += 0.1
            if "worker" in beating:
                self.lifecycle.beat()
            if "api" in beating:
                self.lifecycle.record_api_heartbeat()
            self.watch()

    def die(self) -> None:
        self.worker.kill()
        self.worker = self.supervisor.replace(self.worker)


@pytest.fixture
def bench() -> Bench:
    return Bench()


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


def test_a_worker_that_ends_is_replaced_at_once_and_again_until_the_service_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.supervisor.supervisor.CHECK_SECONDS", 3600.0)
    bench = Bench(has_standby=False)
    launch = bench._launch

    def launch_one_that_soon_ends(epoch: int, word: Connection | None = None) -> Any:
        process = launch(epoch, word)
        if epoch == 2:
            bench.lifecycle.phase.value = Phase.STOPPING
        threading.Thread(target=process.kill).start()
        return process

    bench.supervisor._launch = launch_one_that_soon_ends
    threading.Thread(target=bench.worker.kill).start()
    workers = [bench.worker]
    bench.supervisor.keep_worker(workers)
    assert bench.launched == [(1, False), (2, False)]
    assert (workers[0].epoch, workers[0].is_alive()) == (2, False)


def test_the_end_of_the_api_process_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.supervisor.supervisor.CHECK_SECONDS", 3600.0)
    bench = Bench(has_standby=False)
    has_failed = threading.Event()

    def fail(message: str, hung: Any = None) -> None:
        bench.lifecycle.phase.value = Phase.STOPPING
        bench.failures.append(message)
        has_failed.set()

    bench.supervisor._fail = fail
    watch = partial(bench.supervisor.keep_watch, api=bench.api, worker=lambda: bench.worker)
    threading.Thread(target=watch, daemon=True).start()
    bench.api.kill()
    has_failed.wait()
    assert bench.failures == ["the API process was killed by SIGKILL (out of memory?)"]


def test_a_standby_that_does_not_fit_into_memory_is_not_started(bench: Bench) -> None:
    bench.lifecycle.has_standby_memory.value = False
    bench.watch()
    assert bench.launched == []
    bench.die()
    assert bench.launched == [(1, False)]


def test_without_a_standby_a_worker_is_started() -> None:
    bench = Bench(has_standby=False)
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


def hanging() -> Bench:
    """Ten seconds' patience; the first worker was up after five."""
    bench = Bench(has_standby=False, hang_seconds=10.0)
    bench.lifecycle.epoch_seconds.value = 95.0
    bench.lifecycle.record_api_heartbeat()
    bench.watch()
    return bench


def test_who_gives_signs_of_life_is_left_alone() -> None:
    bench = hanging()
    bench.watch_for(100.0, "worker", "api")
    assert bench.now > 199.0
    assert bench.failures == []


def test_a_worker_that_hangs_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    bench = hanging()
    bench.watch_for(9.5, "api")
    assert bench.worker.is_alive()
    bench.watch_for(1.0, "api")
    assert not bench.worker.is_alive()
    bench.worker = bench.supervisor.replace(bench.worker)
    assert "the worker was killed because it hung; starting another" in caplog.text
    bench.die()
    assert "the worker was killed by SIGKILL (out of memory?); starting another" in caplog.text
    assert bench.failures == []


def test_a_worker_that_hangs_while_it_loads_is_killed_later() -> None:
    """It may take ten times as long as the first: files may have to be read from the disk again."""
    bench = hanging()
    bench.die()
    bench.watch_for(59.0, "api")
    assert bench.worker.is_alive()
    bench.watch_for(2.0, "api")
    assert not bench.worker.is_alive()


def test_an_api_process_that_hangs_ends_the_service() -> None:
    bench = hanging()
    bench.watch_for(9.5, "worker")
    assert bench.failures == []
    bench.watch_for(1.0, "worker")
    assert bench.failures == ["the API process sent no heartbeat for 10 s"]
    assert not bench.api.is_alive()


def test_an_api_process_that_is_not_up_yet_owes_nothing() -> None:
    bench = hanging()
    bench.lifecycle.num_api_beats.value = 0
    bench.watch_for(100.0, "worker")
    assert bench.failures == []


def test_a_limit_of_zero_is_none() -> None:
    bench = Bench(has_standby=False)
    bench.lifecycle.record_api_heartbeat()
    bench.watch_for(1000.0)
    assert bench.worker.is_alive()
    assert bench.failures == []


def test_without_the_api_process_the_service_ends(bench: Bench) -> None:
    bench.watch(api=FakeProcess(-11))
    assert bench.failures == ["the API process was killed by SIGSEGV"]


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
