"""A child that is killed is replaced, one that a limit ends is not."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psutil
import pytest

from service.sandbox import child_process
from service.sandbox.child_process import BoundedProcess, ProcessEnded, ProcessKilled
from tests.e2e.process import wait_until

# Answers its pid and what it was first told; ends by itself, or has itself ended, where an order says so.
CHILD = """
import json, os, sys
opening = None
for line in sys.stdin:
    order = json.loads(line)
    opening = opening or order
    if "signal" in order:
        os.kill(os.getpid(), order["signal"])
    print(json.dumps({"pid": os.getpid(), "opening": opening["name"]}), flush=True)
"""


class OnceItIsStopped(threading.Thread):
    """In place of a timer: patience ends when the child stands still, however long a new one takes to begin."""

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
    process = BoundedProcess(["-c", CHILD])
    assert process.start({"name": "first"})["opening"] == "first"
    yield process
    process.close()


def test_one_that_was_killed_is_replaced_and_told_all_again(process: BoundedProcess) -> None:
    pid = process.ask({})["pid"]
    child = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE, what="its end")
    answer = process.ask({})
    assert answer["pid"] != pid
    assert answer["opening"] == "first"


def test_one_that_a_limit_ends_is_not(process: BoundedProcess) -> None:
    with pytest.raises(ProcessEnded) as raised:
        process.ask({"signal": signal.SIGPROF})
    assert raised.type is ProcessEnded
    assert not process.is_running


def test_what_kills_its_successor_too_is_given_up(process: BoundedProcess) -> None:
    with pytest.raises(ProcessKilled):
        process.ask({"signal": signal.SIGKILL})
    assert not process.is_running


def test_one_that_is_stopped_is_killed_and_replaced(process: BoundedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses no processor time, so no limit of its own would ever end it, and all who come later wait for it."""
    pid = process.ask({})["pid"]
    monkeypatch.setattr(child_process, "threading", SimpleNamespace(Timer=OnceItIsStopped))
    os.kill(pid, signal.SIGSTOP)
    assert process.ask({})["pid"] != pid
    with pytest.raises(ProcessKilled):
        process.ask({"signal": signal.SIGSTOP})
    assert not process.is_running
