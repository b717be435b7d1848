"""A killed child process is replaced; a child process that a limit ends is not."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psutil
import pytest

from service.sandbox import child_process
from service.sandbox.child_process import BoundedProcess, ProcessEnded, ProcessKilled, ProcessLimits, ProcessNotStarted
from tests.e2e.process import wait_until


class StopTimer(threading.Thread):
    """Substitute for `threading.Timer` that fires as soon as the child process is stopped by SIGSTOP."""

    def __init__(self, seconds: float, kill: Callable[[], None]) -> None:
        super().__init__()
        assert seconds == child_process.ANSWER_SECONDS
        self._kill, self._cancelled = kill, threading.Event()
        self._child = psutil.Process(kill.__self__.pid)  # type: ignore[attr-defined]

    def run(self) -> None:
        while not self._cancelled.wait(0.01):
            if self._child.status() == psutil.STATUS_STOPPED:
                return self._kill()

    def cancel(self) -> None:
        self._cancelled.set()
        self.join()


@pytest.fixture
def process() -> Iterator[BoundedProcess]:
    limits = ProcessLimits(cpu_seconds=60.0, memory_bytes=2**30)
    process = BoundedProcess("tests.service.sandbox.pid_reporter", limits, lambda: {"name": "first"})
    yield process
    process.close()


def test_a_killed_child_is_replaced_and_gets_the_opening_again(process: BoundedProcess) -> None:
    pid = process.ask({})["pid"]
    child = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE, what="the end of the child")
    reply = process.ask({})
    assert reply["pid"] != pid
    assert reply["name"] == "first"


def test_a_command_that_exceeds_a_limit_is_not_repeated(process: BoundedProcess) -> None:
    pid = process.ask({})["pid"]
    with pytest.raises(ProcessEnded) as raised:
        process.ask({"signal": signal.SIGPROF})
    assert raised.type is ProcessEnded
    assert not psutil.pid_exists(pid)


def test_a_command_that_kills_two_children_fails(process: BoundedProcess) -> None:
    with pytest.raises(ProcessKilled):
        process.ask({"signal": signal.SIGKILL})


def test_a_child_that_ends_before_its_first_reply_is_not_started(process: BoundedProcess) -> None:
    process._opening = lambda: {"name": "first", "signal": signal.SIGKILL}
    with pytest.raises(ProcessNotStarted):
        process.ask({})


def test_a_stopped_child_is_killed_and_replaced(process: BoundedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped child uses no CPU time, so it is ended by the reply timeout and not by its CPU limit."""
    pid = process.ask({})["pid"]
    monkeypatch.setattr(child_process, "threading", SimpleNamespace(Timer=StopTimer))
    os.kill(pid, signal.SIGSTOP)
    assert process.ask({})["pid"] != pid
    with pytest.raises(ProcessKilled):
        process.ask({"signal": signal.SIGSTOP})
