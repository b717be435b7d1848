"""Start of worker processes: import, order, exit code, and end with main."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.ipc.channel import Channel
from service.ipc.shared_state import WorkerState
from service.supervisor.worker_process import WorkerProcess
from service.worker import worker as worker_module
from service.worker.worker import importable_name

PATIENCE_SECONDS = 600.0


class Reporting:
    """Worker that writes a report to a file and exits with code 7."""

    def __init__(self, order: Any, state: WorkerState, channel: Any, control: int) -> None:
        self._order, self._state, self._channel = order, state, channel

    def run(self) -> None:
        self._state.num_heartbeats.value = os.getpid()
        self._channel.send(f"{psutil.Process().name()} {os.getpriority(os.PRIO_PROCESS, 0)}".encode())
        os._exit(7)


@dataclass
class Order:
    """Order with the fields that `service.worker.worker.main` reads, and more data than a socket's buffer holds."""

    worker_class: str
    main_pid: int
    ballast: bytes = b"x" * 2_000_000


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        pass


@pytest.mark.parametrize("is_standby", [False, True])
def test_worker_runs_its_order_with_the_shared_memory_and_the_channel(tmp_path: Path, is_standby: bool) -> None:
    worker = WorkerProcess.start(is_standby=is_standby)
    if is_standby:
        wait_until(worker.has_imported)
        assert psutil.Process(worker.pid).name() == "kvasir-standby"
    state, channel = WorkerState(), Channel()
    order = pickle.dumps(Order(importable_name(Reporting), os.getpid()))
    assert worker.begin(order, [state.descriptor, channel.worker_end.fileno()], has_standby=False) is None
    report = channel._socket.recv(100)
    assert report.endswith(b"kvasir-worker " + str(os.getpriority(os.PRIO_PROCESS, 0)).encode())
    assert (state.num_heartbeats.value, state.begun_epoch.value) == (worker.pid, 0)
    wait_until(lambda: worker.exitcode is not None)
    assert worker.exitcode == 7
    assert not worker.has_imported()
    worker.close()
    channel.close()


def test_worker_forks_a_standby_that_takes_its_place_and_forks_the_next(tmp_path: Path) -> None:
    """Main is the parent of each standby: it reads the exit code, and the worker's end leaves the standby alone."""
    state, channel = WorkerState(), Channel()
    order = pickle.dumps(Order(importable_name(Reporting), os.getpid()))
    worker = WorkerProcess.start()
    pids = []
    for _ in range(3):
        standby = worker.begin(order, [state.descriptor, channel.worker_end.fileno()], has_standby=True)
        assert standby is not None
        assert b"kvasir-worker" in channel._socket.recv(100)
        wait_until(lambda: worker.exitcode is not None)  # noqa: B023 - the loop's worker
        pids.append(worker.pid)
        assert (state.num_heartbeats.value, worker.exitcode) == (worker.pid, 7)
        worker.close()
        wait_until(standby.has_imported)
        process = psutil.Process(standby.pid)
        assert (process.ppid(), process.name()) == (os.getpid(), "kvasir-standby")
        assert os.getpgid(standby.pid) == standby.pid
        worker = standby
    assert len({*pids, worker.pid}) == 4
    worker.close()
    assert worker.exitcode == -signal.SIGKILL
    channel.close()


def test_standby_of_a_worker_that_dies_before_its_order_has_ended(tmp_path: Path) -> None:
    worker = WorkerProcess.start()
    standby = worker.begin(b"never read", [], has_standby=True)
    assert standby is not None
    assert standby.exitcode is None
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: standby.exitcode is not None)
    assert not standby.has_imported()
    for process in (standby, worker):
        process.close()


@pytest.mark.parametrize("milliseconds", [0, 2, 5, 10])
def test_no_process_is_left_of_a_worker_killed_while_it_forks_a_standby(tmp_path: Path, milliseconds: int) -> None:
    before = set(psutil.Process().children())
    state, channel = WorkerState(), Channel()
    order = pickle.dumps(Order(importable_name(Reporting), os.getpid()))
    worker = WorkerProcess.start()
    wait_until(worker.has_imported)
    standby = worker.begin(order, [state.descriptor, channel.worker_end.fileno()], has_standby=True)
    assert standby is not None
    time.sleep(milliseconds / 1000)
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: worker.exitcode is not None)
    for process in (worker, standby):
        process.close()
    assert set(psutil.Process().children()) <= before
    channel.close()


def test_worker_that_dies_before_its_order_has_an_exit_code(tmp_path: Path) -> None:
    worker = WorkerProcess.start()
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: worker.exitcode is not None)
    worker.begin(b"late", [], has_standby=False)
    assert worker.exitcode == -signal.SIGKILL
    assert not worker.has_imported()
    assert not worker.has_ever_imported
    worker.close()
    worker.close()


def test_standby_that_was_killed_with_its_worker_does_not_begin() -> None:
    standby, state, channel = WorkerProcess.start(), WorkerState(), Channel()
    wait_until(standby.has_imported)
    os.kill(standby.pid, signal.SIGSTOP)
    standby.begin(b"never read", [state.descriptor, channel.worker_end.fileno()], has_standby=False)
    os.kill(standby.pid, signal.SIGKILL)
    wait_until(lambda: standby.exitcode is not None)
    assert (standby.has_imported(), standby.has_ever_imported, state.begun_epoch.value) == (False, True, -1)
    standby.close()
    channel.close()


def test_closed_worker_ends(tmp_path: Path) -> None:
    worker = WorkerProcess.start()
    process = psutil.Process(worker.pid)
    worker.close()
    assert not process.is_running()


def test_worker_ends_when_main_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys; from service.supervisor.worker_process import WorkerProcess;"
        "worker = WorkerProcess.start(); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as main:
        assert main.stdout is not None
        main.stdout.readline()
        (child,) = psutil.Process(main.pid).children()
        main.kill()
        assert psutil.wait_procs([child], PATIENCE_SECONDS)[1] == []


def test_standby_imports_at_the_lowest_priority_in_that_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    set_priorities: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda which, who, niceness: set_priorities.append(niceness))
    monkeypatch.setattr(worker_module, "_IMPORT", "json")
    worker_module._import_at_low_priority()
    assert set_priorities == [19]
