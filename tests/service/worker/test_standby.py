"""The next worker: one is kept, begins when it is told, and its death harms nobody."""

import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

import pytest

from service.worker import standby as standby_module
from service.worker.standby import Standby, wait_for_word


class FakeProcess:
    def __init__(self, word: Connection) -> None:
        self.word = word
        self.is_there = True

    def is_alive(self) -> bool:
        return self.is_there

    def kill(self) -> None:
        self.is_there = False

    def join(self) -> None:
        assert not self.is_there


class Bench:
    """A standby, and the processes it has started."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.failure: OSError | None = None
        self.imports_at_once = True
        self.standby = Standby(self._launch)

    def _launch(self, word: Connection) -> Any:
        if self.failure is not None:
            raise self.failure
        # As in a process of its own, the connection outlives main's copy of it.
        process = FakeProcess(Connection(standby_module.os.dup(word.fileno())))
        if self.imports_at_once:
            process.word.send_bytes(b"imported")
        self.started.append(process)
        return process


def test_ctrl_c_waits_until_it_ignores_it() -> None:
    """A terminal sends it to all processes, also to one that has just begun to import."""
    blocked: list[set[int]] = []

    def launch(word: Connection) -> Any:
        blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        return FakeProcess(word)

    Standby(launch).keep()
    assert signal.SIGINT in blocked[0]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_one_is_kept() -> None:
    bench = Bench()
    bench.standby.keep()
    bench.standby.keep()
    assert len(bench.started) == 1
    bench.standby.close()


def test_it_begins_once_and_another_takes_its_place() -> None:
    bench = Bench()
    bench.standby.keep()
    begun: Any = bench.standby.begin()
    assert begun is bench.started[0]
    assert begun.word.recv_bytes() == b"begin"
    assert begun.is_there
    assert bench.standby.begin() is None
    bench.standby.keep()
    assert len(bench.started) == 2
    bench.standby.close()
    assert (begun.is_there, bench.started[1].is_there) == (True, False)


def test_there_may_be_none() -> None:
    assert Bench().standby.begin() is None


def test_a_dead_one_does_not_begin() -> None:
    bench = Bench()
    bench.standby.keep()
    bench.started[0].kill()
    assert bench.standby.begin() is None


def test_one_that_still_imports_is_ended_for_one_that_begins_now_is_ahead_of_it() -> None:
    bench = Bench()
    bench.imports_at_once = False
    bench.standby.keep()
    assert bench.standby.begin() is None
    assert not bench.started[0].is_there


def test_one_that_dies_while_it_is_told_does_not_begin() -> None:
    bench = Bench()
    bench.standby.keep()
    bench.started[0].word.close()
    assert bench.standby.begin() is None


def test_a_dead_one_is_replaced_until_it_has_died_too_often() -> None:
    bench = Bench()
    for _ in range(10):
        bench.standby.keep()
        bench.started[-1].kill()
    assert len(bench.started) == 3
    assert bench.standby.begin() is None


def test_where_none_can_be_started_the_service_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.failure = BlockingIOError(11, "Resource temporarily unavailable")
    for _ in range(10):
        bench.standby.keep()
    assert bench.standby.begin() is None
    assert bench.started == []


def test_it_waits_until_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.imports_at_once = False
    mains: list[Connection] = []
    pipe = standby_module.get_context("spawn").Pipe

    class Context:
        def Pipe(self) -> tuple[Connection, Connection]:
            theirs, ours = pipe()
            mains.append(ours)
            return theirs, ours

    monkeypatch.setattr(standby_module, "get_context", lambda _: Context())
    bench.standby.keep()
    word = bench.started[0].word
    waiting = threading.Thread(target=wait_for_word, args=(word,))
    waiting.start()
    assert mains[0].poll(60.0)
    assert bench.standby.begin() is bench.started[0]
    waiting.join()
    assert word.closed


def test_it_ends_when_nobody_is_left_to_begin_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Exception):
        pass

    def end(code: int) -> None:
        assert code == 0
        raise Ended

    monkeypatch.setattr(standby_module.os, "_exit", end)
    bench = Bench()
    bench.standby.keep()
    bench.standby.close()
    with pytest.raises(Ended):
        wait_for_word(bench.started[0].word)
