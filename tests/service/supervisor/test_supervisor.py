"""Replacement of workers, hangs, drain and end of the service, with fake processes."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from socket import socketpair
from types import SimpleNamespace
from typing import Any, cast

import pytest

from service.ipc.shared_state import Lifecycle, Phase, WorkerState
from service.supervisor.supervisor import StartError, Supervisor, check_port, failed_start, listen
from service.supervisor.worker_slot import WorkerSlot
from service.worker.worker import EXIT_CHECKPOINT_CHANGED, EXIT_SETTINGS, EXIT_START_FAILED


class FakeProcess:
    """Worker or API process whose sentinel becomes readable at its end."""

    def __init__(self, exitcode: int | None = None, *, is_standby: bool = False) -> None:
        self.exitcode = exitcode
        self.is_standby = is_standby
        self.imported, self.is_forking = True, False
        self.num_begun = 0
        self.has_ever_imported = False
        self.sent: list[bytes] = []
        self._ours, self._theirs = socketpair()
        self.sentinel = self._ours.fileno()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def has_imported(self) -> bool:
        return self.is_alive() and self.imported

    def send(self, content: bytes) -> None:
        self.sent.append(content)

    def wait_for_fork(self) -> None:
        self.imported = self.imported or self.is_forking

    def kill(self) -> None:
        self.exitcode = -9 if self.exitcode is None else self.exitcode
        self._theirs.close()

    close = terminate = kill

    def join(self, timeout: float | None = None) -> None:
        assert self.exitcode is not None

    def __del__(self) -> None:
        self._ours.close()
        self._theirs.close()


class Bench:
    """Supervisor of fake processes, and the processes that it has started."""

    def __init__(
        self,
        *,
        has_standby: bool = True,
        hang_seconds: float = 0.0,
        drain_seconds: float = 3600.0,
        num_workers: int = 1,
    ) -> None:
        self.lifecycle = Lifecycle(main_pid=os.getpid())
        self.lifecycle.enter(Phase.SERVING)
        self.states = [WorkerState() for _ in range(num_workers)]
        self.state = self.states[0]
        for state in self.states:
            state.ready_epoch.value = 0
        self.started: list[FakeProcess] = []
        self.forked: list[FakeProcess] = []  # standbys that workers have forked
        self.now = 100.0
        self.error: OSError | None = None
        self.can_fork = True
        self.api: Any = FakeProcess()
        times = {"hang_seconds": hang_seconds, "drain_seconds": drain_seconds}
        values = SimpleNamespace(standby=has_standby, otlp_endpoint=None, **times)
        self.settings = cast(Any, values)
        self.slots = [
            WorkerSlot(
                state, self._begin, name=f"worker {index}" if num_workers > 1 else "the worker", clock=lambda: self.now
            )
            for index, state in enumerate(self.states)
        ]
        for slot in self.slots:
            slot.process = cast(Any, FakeProcess())
        self.supervisor = Supervisor(
            self.lifecycle,
            slots=self.slots,
            start_worker=self._start,
            start_api=lambda: self.api,
            settings=self.settings,
            clock=lambda: self.now,
        )

    def _start(self, is_standby: bool) -> Any:
        if self.error is not None:
            raise self.error
        self.started.append(FakeProcess(is_standby=is_standby))
        return self.started[-1]

    def _begin(self, worker: Any, has_standby: bool) -> Any:
        worker.num_begun += 1
        if not has_standby:
            return None
        self.forked.append(FakeProcess(None if self.can_fork else -9, is_standby=True))
        self.forked[-1].imported, self.forked[-1].is_forking = False, True
        return self.forked[-1]

    @property
    def worker(self) -> Any:
        return self.slots[0].process

    @property
    def is_over(self) -> bool:
        return self.lifecycle.phase.value == Phase.STOPPING

    @property
    def kinds(self) -> list[str]:
        return ["standby" if process.is_standby else "worker" for process in self.started]

    def check(self) -> None:
        self.supervisor.check(self.api)

    def check_for(self, seconds: float, *beating: str) -> None:
        """Check ten times a second, with heartbeats of the named processes, until a process is killed."""
        until = self.now + seconds
        while self.now < until and self.worker.is_alive() and self.api.is_alive():
            self.now += 0.1
            if "worker" in beating:
                self.state.beat()
            if "api" in beating:
                self.lifecycle.num_api_beats.value += 1
            self.check()

    def die(self, exitcode: int = -9) -> None:
        self.worker.exitcode = exitcode
        self.check()


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("ended", "said", "code"),
    [
        (EXIT_START_FAILED, "", 1),
        (EXIT_SETTINGS, "", 2),
        (EXIT_CHECKPOINT_CHANGED, "", 1),
        (-9, "the worker was killed by SIGKILL (out of memory?) while starting", 1),
        (
            -signal.SIGBUS,
            "the worker was killed by SIGBUS (was a file of the checkpoint truncated, or could its disk not be read?) "
            "while starting",
            1,
        ),
        (-40, "the worker was killed by signal 40 while starting", 1),
        (1, "the worker ended with exit code 1 while starting", 1),
    ],
)
def test_worker_that_ends_while_starting_is_a_start_error(ended: int, said: str, code: int) -> None:
    bench = Bench()
    bench.lifecycle.phase.value, bench.state.ready_epoch.value = Phase.STARTING, -1
    bench.worker.exitcode = ended
    with pytest.raises(StartError) as failure:
        bench.supervisor.run()
    assert (str(failure.value), failure.value.exit_code) == (said, code)
    assert str(failed_start(bench.slots[0])) == said
    assert bench.is_over


def test_port_in_use_is_a_start_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is in use; choose another with --port"):
            check_port("127.0.0.1", port)


def test_a_port_is_taken_as_soon_as_a_service_has_opened_it() -> None:
    """The API process of the first service need not accept connections yet."""
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


def test_standby_becomes_the_worker_and_forks_the_next_standby(bench: Bench) -> None:
    bench.check()
    assert bench.kinds == ["standby"], "the first worker has forked none"
    bench.slots[0].confirm(b"verified")
    assert bench.worker.sent == [b"verified"]
    bench.die()
    assert bench.worker is bench.started[0]
    assert bench.worker.sent == [b"verified"]
    assert (bench.worker.num_begun, bench.state.epoch.value) == (1, 1)
    bench.state.ready_epoch.value = 1
    bench.check()
    assert bench.kinds == ["standby"]
    bench.die()
    assert bench.worker is bench.forked[0]
    assert bench.supervisor._standby is cast(Any, bench.forked[1])


def test_standby_that_no_worker_could_fork_is_started_when_the_worker_is_ready(bench: Bench) -> None:
    bench.can_fork = False
    bench.die()
    bench.check()
    assert bench.kinds == ["worker"], "a starting worker needs the processors"
    bench.state.ready_epoch.value = 1
    bench.check()
    assert bench.kinds == ["worker", "standby"]


def test_forked_standby_without_memory_for_it_is_ended_when_the_worker_is_ready(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.die()
    bench.state.has_standby_memory.value = False
    bench.check()
    assert bench.forked[0].is_alive()
    bench.state.ready_epoch.value = 1
    bench.check()
    assert not bench.forked[0].is_alive()
    assert bench.kinds == ["worker"]
    assert "the standby worker died" not in caplog.text


def test_standby_that_still_imports_is_killed_and_a_new_worker_starts(bench: Bench) -> None:
    bench.check()
    bench.started[0].imported = False
    bench.die()
    assert bench.kinds == ["standby", "worker"]
    assert not bench.started[0].is_alive()
    assert bench.worker is bench.started[1]


def test_dead_standby_is_replaced_three_times_at_most(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        bench.check()
        bench.started[-1].kill()
        bench.check()
    assert bench.kinds == ["standby"] * 3
    assert caplog.text.count("the standby worker died") == 3
    bench.die()
    assert bench.kinds[3:] == ["worker"]


def test_standby_that_cannot_be_started_is_given_up_after_three_trials(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.error = BlockingIOError(11, "Resource temporarily unavailable")
    for _ in range(5):
        bench.check()
    assert caplog.text.count("no standby worker can be started: [Errno 11]") == 3
    assert not bench.is_over


def test_no_standby_starts_without_memory_for_it(bench: Bench) -> None:
    bench.state.has_standby_memory.value = False
    bench.check()
    assert bench.kinds == []
    bench.die()
    assert bench.kinds == ["worker"]


def test_dead_workers_are_replaced_and_counted(bench: Bench) -> None:
    bench.settings.standby = False
    bench.die()
    bench.die(1)
    assert bench.kinds == ["worker", "worker"]
    assert bench.state.epoch.value == 2
    assert (bench.state.num_killed.value, bench.state.num_exited.value) == (1, 1)


def test_a_standby_that_dies_with_the_worker_counts_as_no_restart(bench: Bench) -> None:
    bench.can_fork = False
    bench.check()
    bench.started[0].has_ever_imported = True
    bench.die()
    bench.die()
    assert bench.worker is bench.started[-1]
    assert bench.kinds == ["standby", "worker"]
    assert (bench.state.epoch.value, bench.state.num_killed.value) == (1, 1)


def test_sixth_worker_death_within_a_minute_ends_the_service(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        bench.die()
    assert not bench.is_over
    bench.die()
    assert bench.is_over
    assert "the worker died 6 times within a minute (was killed by SIGKILL" in caplog.text


def test_worker_deaths_older_than_a_minute_do_not_count(bench: Bench) -> None:
    for _ in range(20):
        bench.die()
        bench.now += 13.0
    assert not bench.is_over


def test_service_ends_at_once_if_the_checkpoint_has_changed(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.die()
    bench.die(EXIT_CHECKPOINT_CHANGED)
    assert bench.is_over
    assert caplog.messages[-1] == (
        "the worker cannot be replaced, because the checkpoint has changed; restart the service"
    )


def test_service_ends_if_no_worker_can_be_started(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.error = BlockingIOError(11, "Resource temporarily unavailable")
    bench.die()
    assert bench.is_over
    assert "no worker can be started to replace the dead worker: [Errno 11] Resource" in caplog.text


def test_death_of_the_api_process_ends_the_service(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.api = FakeProcess(-11)
    bench.check()
    assert bench.is_over
    assert "the API process was killed by SIGSEGV" in caplog.text


@pytest.mark.parametrize("victim", ["api", "worker"])
def test_end_of_a_process_wakes_the_supervisor_at_once(victim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.supervisor.supervisor._CHECK_SECONDS", 3600.0)
    bench = Bench(has_standby=False)
    bench.error = BlockingIOError(11, "Resource temporarily unavailable")
    threading.Thread(target=getattr(bench, victim).kill).start()
    assert bench.supervisor.run() == 1
    assert not bench.api.is_alive()
    assert not bench.worker.is_alive()


def hanging() -> Bench:
    """Return a bench with a hang limit of 10 s, whose first worker took 5 s to start."""
    bench = Bench(has_standby=False, hang_seconds=10.0)
    bench.supervisor._start_seconds = 5.0
    bench.lifecycle.num_api_beats.value += 1
    bench.check()
    return bench


def test_processes_with_heartbeats_are_not_killed() -> None:
    bench = hanging()
    bench.check_for(100.0, "worker", "api")
    assert bench.now > 199.0
    assert not bench.is_over


def test_worker_that_hangs_is_killed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    bench = hanging()
    first = bench.worker
    bench.check_for(9.5, "api")
    assert first.is_alive()
    bench.check_for(1.0, "api")
    assert not first.is_alive()
    bench.check()
    assert "the worker was killed because it hung; starting another" in caplog.text
    bench.die()
    assert "the worker was killed by SIGKILL (out of memory?); starting another" in caplog.text
    assert not bench.is_over


def test_worker_that_loads_may_be_silent_for_ten_times_the_first_start() -> None:
    bench = hanging()
    bench.die()
    bench.check_for(59.0, "api")
    assert bench.worker.is_alive()
    bench.check_for(2.0, "api")
    assert not bench.worker.is_alive()


def test_api_process_that_hangs_ends_the_service(caplog: pytest.LogCaptureFixture) -> None:
    bench = hanging()
    bench.check_for(9.5, "worker")
    assert not bench.is_over
    bench.check_for(1.0, "worker")
    assert "the API process sent no heartbeat for 10 s" in caplog.text
    assert bench.is_over
    assert not bench.api.is_alive()


def test_api_process_without_a_first_heartbeat_is_not_killed() -> None:
    bench = hanging()
    bench.lifecycle.num_api_beats.value = 0
    bench.check_for(100.0, "worker")
    assert not bench.is_over


def test_hang_limit_of_zero_is_no_limit() -> None:
    bench = Bench(has_standby=False)
    bench.lifecycle.num_api_beats.value += 1
    bench.check_for(1000.0)
    assert bench.worker.is_alive()
    assert not bench.is_over


def test_drain_waits_for_the_last_request(bench: Bench) -> None:
    bench.lifecycle.num_active.value = 1
    bench.supervisor.on_signal(signal.SIGTERM, None)
    bench.check()
    assert bench.lifecycle.phase.value == Phase.DRAINING
    bench.lifecycle.num_active.value = 0
    bench.check()
    assert bench.is_over
    assert bench.supervisor._exit_code == 0


def test_drain_ends_after_the_drain_time() -> None:
    bench = Bench(drain_seconds=0.0)
    bench.lifecycle.num_active.value = 1
    bench.supervisor.on_signal(signal.SIGTERM, None)
    bench.check()
    assert bench.is_over


def test_second_signal_ends_the_drain(bench: Bench) -> None:
    bench.lifecycle.num_active.value = 1
    for _ in range(2):
        bench.supervisor.on_signal(signal.SIGTERM, None)
    bench.check()
    assert bench.is_over


def test_dead_worker_is_replaced_during_the_drain(bench: Bench) -> None:
    bench.lifecycle.num_active.value = 1
    bench.supervisor.on_signal(signal.SIGTERM, None)
    bench.die()
    assert bench.worker is bench.started[-1]
    assert not bench.is_over


def test_forked_child_ignores_the_inherited_signal_handler(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: bench.lifecycle.main_pid + 1)
    bench.supervisor.on_signal(signal.SIGTERM, None)
    assert bench.lifecycle.phase.value == Phase.SERVING


def test_signal_while_the_worker_starts_ends_the_service_without_an_error(bench: Bench) -> None:
    bench.lifecycle.phase.value, bench.state.ready_epoch.value = Phase.STARTING, -1
    bench.supervisor.on_signal(signal.SIGTERM, None)
    assert bench.supervisor.run() == 0
    assert not bench.worker.is_alive()


def test_signal_between_worker_and_api_process_drains(bench: Bench) -> None:
    bench.lifecycle.phase.value = Phase.STARTING
    bench.supervisor.on_signal(signal.SIGTERM, None)
    assert bench.supervisor.run() == 0
    assert not bench.api.is_alive()


def test_end_of_the_service_leaves_no_process(bench: Bench) -> None:
    bench.check()
    bench.supervisor.end()
    assert not bench.worker.is_alive()
    assert not bench.started[0].is_alive()


def starting_pair() -> Bench:
    """Return a bench of two workers in the phase STARTING, whose second worker has not been started."""
    bench = Bench(num_workers=2)
    bench.lifecycle.phase.value, bench.slots[1].process = Phase.STARTING, None
    for state in bench.states:
        state.ready_epoch.value = -1
    bench.supervisor._standby = bench.slots[0].begin(bench.worker, has_standby=True)
    return bench


def test_the_second_worker_is_the_standby_of_the_first_and_has_its_cache_size() -> None:
    bench = starting_pair()
    bench.states[0].ready_epoch.value, bench.states[0].num_blocks.value = 0, 17
    waits: list[float] = []

    def start_api() -> Any:
        waits.append(bench.now)
        bench.supervisor.on_signal(signal.SIGTERM, None)
        return bench.api

    bench.supervisor._start_api = start_api
    threading.Timer(0.1, lambda: setattr(bench.states[1].ready_epoch, "value", 0)).start()
    assert bench.supervisor.run() == 0
    assert len(waits) == 1, "the API process starts when both workers are ready"
    assert bench.slots[1].process is cast(Any, bench.forked[0])
    assert bench.states[1].num_blocks.value == 17
    assert bench.kinds == []


def test_a_worker_that_ends_while_another_starts_is_a_start_error() -> None:
    bench = starting_pair()
    bench.states[0].ready_epoch.value = 0
    bench._begin = lambda worker, has_standby: worker.kill() if bench.slots[1].process else None  # type: ignore[method-assign]
    for slot in bench.slots:
        slot._send_order = bench._begin
    with pytest.raises(StartError, match="worker 1 was killed by SIGKILL"):
        bench.supervisor.run()


def test_the_standby_replaces_whichever_worker_dies(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(num_workers=2)
    first, second = (slot.process for slot in bench.slots)
    bench.check()
    cast(Any, second).exitcode = -9
    bench.check()
    assert bench.slots[0].process is first
    assert bench.slots[1].process is cast(Any, bench.started[0])
    assert [state.epoch.value for state in bench.states] == [0, 1]
    assert "worker 1 was killed by SIGKILL" in caplog.text


def test_two_workers_that_die_at_once_are_replaced_by_the_standby_and_by_the_standby_that_it_forks() -> None:
    bench = Bench(num_workers=2)
    bench.check()
    for slot in bench.slots:
        cast(Any, slot.process).exitcode = -9
    bench.check()
    assert [slot.process for slot in bench.slots] == [bench.started[0], bench.forked[0]]
    assert bench.supervisor._standby is cast(Any, bench.forked[1])


def test_a_hung_worker_is_killed_and_the_other_goes_on() -> None:
    bench = Bench(num_workers=2, has_standby=False, hang_seconds=10.0)
    first, second = (cast(Any, slot.process) for slot in bench.slots)
    bench.lifecycle.num_api_beats.value += 1
    for _ in range(110):
        bench.now += 0.1
        bench.states[1].beat()
        bench.lifecycle.num_api_beats.value += 1
        bench.check()
    assert not first.is_alive()
    assert second.is_alive()
    assert [state.epoch.value for state in bench.states] == [1, 0]
