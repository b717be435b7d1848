"""Engine loop: order of commands, one message per step, and errors for all requests after a failure."""

import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from service.ipc.messages import (
    Cancel,
    Command,
    CommandBatch,
    EngineIdle,
    Event,
    FinishReason,
    Started,
    StepStats,
    Submit,
    TokenDelta,
    decode_commands,
    encode_commands,
)
from service.supervisor.worker_process import WorkerProcess
from service.worker import engine_loop, worker
from service.worker.engine_loop import EngineLoop
from service.worker.worker import EXIT_SETTINGS, CheckpointChanged, Worker, stamps_of
from tests.service.sequences import make_delta, make_finish, make_stats, make_submit


@dataclass
class Result:
    events: list[TokenDelta]
    stats: StepStats


@dataclass
class ScriptedEngine:
    """Engine that counts one token per step for each sequence, and records the calls."""

    calls: list[Any] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    before_step: Callable[[], None] = lambda: None
    admitted: list[tuple[str, int]] = field(default_factory=list)
    live: dict[str, tuple[Submit, int]] = field(default_factory=dict)

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def submit(self, submit: Submit) -> None:
        self.calls.append(("submit", submit.uid, submit.attempt))
        self.live[submit.uid] = (submit, 0)
        self.admitted.append((submit.uid, submit.attempt))

    def cancel(self, uid: str) -> None:
        self.calls.append(("cancel", uid))
        self.live.pop(uid, None)

    def check_integrity(self) -> None:
        self.calls.append("check")

    def prepare_grammars(self) -> None:
        self.calls.append("prepare")

    def step(self, *, before: Callable[[list[tuple[str, int]]], None]) -> Result:
        if self.admitted:
            before(self.admitted)
        self.admitted = []
        self.before_step()
        self.calls.append("step")
        if self.failures:
            raise self.failures.pop(0)
        events = []
        for uid, (submit, count) in list(self.live.items()):
            is_last = count + 1 == submit.params.max_tokens
            finish = make_finish() if is_last else None
            events.append(make_delta(uid, index=count, ids=(1,), text="x", attempt=submit.attempt, finish=finish))
            self.live[uid] = (submit, count + 1)
            if is_last:
                del self.live[uid]
        return Result(events, make_stats(num_running=len(self.live)))

    def abort_all(self, error: str) -> list[TokenDelta]:
        self.calls.append("abort_all")
        finish = make_finish(FinishReason.ERROR, error=error)
        events = [make_delta(uid, attempt=s.attempt, index=n, finish=finish) for uid, (s, n) in self.live.items()]
        self.live.clear()
        return events


class Bench:
    """Engine loop with a list of commands, and the events that the loop has sent."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.inbox: SimpleQueue[bytes] = SimpleQueue()
        self.sent: list[list[Event]] = []  # without the statistics
        self.statistics: list[StepStats | EngineIdle] = []
        self.sent_now: list[list[Event]] = []
        self.num_heartbeats = 0
        self.engine_loop = self.make_engine_loop()

    def make_engine_loop(self, **more: Any) -> EngineLoop:
        engine: Any = self.engine
        return EngineLoop(
            engine, receive=self._receive, send=self._send, send_now=self.sent_now.append, beat=self._beat, **more
        )

    def _beat(self) -> None:
        self.num_heartbeats += 1

    def put(self, *commands: Command) -> None:
        self.inbox.put(encode_commands(CommandBatch(0, list(commands))))

    def _receive(self, timeout_seconds: float) -> list[Command] | None:
        try:
            message = self.inbox.get(block=timeout_seconds > 0.0, timeout=timeout_seconds)
        except Empty:
            return None
        return decode_commands(message).commands

    def _send(self, events: list[Event]) -> None:
        self.statistics += [event for event in events if isinstance(event, StepStats | EngineIdle)]
        others: list[Event] = [event for event in events if not isinstance(event, StepStats | EngineIdle)]
        if others:
            self.sent.append(others)

    def started(self) -> list[tuple[str, int]]:
        """Uid and attempt of each sequence that was reported before its computation."""
        told = [event for events in self.sent_now for event in events]
        return [(event.uid, event.attempt) for event in told if isinstance(event, Started)]

    def uids(self) -> list[list[str]]:
        return [[event.uid for event in events if isinstance(event, TokenDelta)] for events in self.sent]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_step_sends_one_message_with_the_events_of_all_sequences(bench: Bench) -> None:
    bench.put(make_submit("a"), make_submit("b"))
    bench.put(make_submit("c"))
    bench.engine_loop.run_once()
    assert bench.uids() == [["a", "b", "c"]]
    assert bench.engine.calls == [("submit", "a", 0), ("submit", "b", 0), ("submit", "c", 0), "step"]


def test_steps_and_idleness_are_reported(bench: Bench) -> None:
    bench.put(make_submit("a", max_tokens=2))
    for _ in range(2):
        bench.engine_loop.run_once()
    bench.put(make_submit("b", max_tokens=1))
    bench.engine_loop.run_once()
    kinds = [type(event) for event in bench.statistics]
    assert kinds == [EngineIdle, StepStats, StepStats, EngineIdle, StepStats]


def test_commands_that_arrive_during_a_step_take_effect_before_the_next_step(bench: Bench) -> None:
    bench.put(make_submit("a"))
    bench.engine.before_step = lambda: bench.put(make_submit("b"))
    bench.engine_loop.run_once()
    bench.engine.before_step = lambda: None
    bench.engine_loop.run_once()
    assert bench.uids() == [["a"], ["a", "b"]]


def test_a_cancelled_sequence_is_removed_before_the_next_step(bench: Bench) -> None:
    bench.put(make_submit("a"), make_submit("b"))
    bench.engine_loop.run_once()
    bench.put(Cancel(uid="a"))
    bench.engine_loop.run_once()
    assert bench.uids() == [["a", "b"], ["b"]]
    assert bench.engine.calls[-2:] == [("cancel", "a"), "step"]


def test_when_the_engine_raises_every_request_ends_with_an_error_and_the_next_is_served(bench: Bench) -> None:
    bench.put(make_submit("a"), make_submit("b"))
    bench.engine.failures = [ZeroDivisionError("at /some/path")]
    bench.engine_loop.run_once()
    (events,) = bench.sent
    finishes = [event.finish for event in events if isinstance(event, TokenDelta)]
    assert [finish and finish.reason for finish in finishes] == [FinishReason.ERROR] * 2
    assert all(finish and "path" not in (finish.error or "") for finish in finishes)
    bench.put(make_submit("c"))
    bench.engine_loop.run_once()
    assert bench.uids()[1] == ["c"]


def test_a_second_engine_failure_in_a_row_ends_the_worker(bench: Bench) -> None:
    bench.engine.failures = [ValueError("once"), ValueError("twice")]
    bench.put(make_submit("a"))
    bench.engine_loop.run_once()
    bench.put(make_submit("b"))
    with pytest.raises(RuntimeError, match="two engine steps in a row"):
        bench.engine_loop.run_once()
    assert bench.uids() == [["a"], ["b"]], "the second one has its ending, too"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("unspecified launch failure"),
    ],
)
def test_a_cuda_error_ends_the_worker_and_no_request(bench: Bench, error: Exception) -> None:
    """A new worker continues the requests: every later CUDA call of this process would fail."""
    bench.engine.failures = [error]
    bench.put(make_submit("a"))
    with pytest.raises(RuntimeError, match="the CUDA device reported an error"):
        bench.engine_loop.run_once()
    assert not bench.sent
    assert "abort_all" not in bench.engine.calls


def test_exhausted_gpu_memory_does_not_end_the_worker(bench: Bench) -> None:
    bench.engine.failures = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")]
    bench.put(make_submit("a"))
    bench.engine_loop.run_once()
    assert bench.uids() == [["a"]]


def test_engine_failures_with_a_success_between_do_not_end_the_worker(bench: Bench) -> None:
    for uid in ("a", "b", "c"):
        bench.engine.failures = [ValueError(uid)]
        bench.put(make_submit(uid))
        bench.engine_loop.run_once()
        bench.put(make_submit(uid + "!", max_tokens=1))
        bench.engine_loop.run_once()
    assert bench.uids() == [["a"], ["a!"], ["b"], ["b!"], ["c"], ["c!"]]


def test_an_idle_iteration_does_not_check_the_block_pool(bench: Bench) -> None:
    for uid in ("a", "b"):
        bench.put(make_submit(uid, max_tokens=1))
        bench.engine_loop.run_once()
    assert bench.engine.calls == [("submit", "a", 0), "step", ("submit", "b", 0), "step"]
    assert bench.inbox.empty()


def test_a_sequence_is_reported_once_and_before_its_first_step(bench: Bench) -> None:
    num_reported: list[int] = []
    bench.engine.before_step = lambda: num_reported.append(len(bench.started()))
    bench.put(make_submit("a", max_tokens=3))
    bench.put(make_submit("b", max_tokens=3))
    bench.engine_loop.run_once()
    bench.engine_loop.run_once()
    assert num_reported == [2, 2]
    assert bench.started() == [("a", 0), ("b", 0)]


def test_a_sequence_with_a_grammar_is_reported_before_the_grammar_is_compiled(bench: Bench) -> None:
    bench.engine.submit = lambda submit: bench.engine.calls.append(len(bench.started()))  # type: ignore[method-assign]
    bench.put(msgspec.structs.replace(make_submit("a"), grammar="start: /a+/"), make_submit("b"))
    bench.engine_loop.run_once()
    assert bench.engine.calls == [1, 1]
    assert bench.started() == [("a", 0)]


def test_every_iteration_sends_a_heartbeat(bench: Bench) -> None:
    bench.put(make_submit("a", max_tokens=3))
    bench.engine_loop.run_once()
    before = bench.num_heartbeats
    bench.engine_loop.run_once()
    bench.engine_loop.run_once()
    assert bench.num_heartbeats == before + 2


def test_a_waiting_worker_sends_heartbeats(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "_BEAT_SECONDS", 0.001)
    thread = threading.Thread(target=bench.engine_loop.run_once, daemon=True)
    thread.start()
    while bench.num_heartbeats < 5:
        thread.join(0.001)
    assert thread.is_alive(), "there is nothing to do"
    bench.put(make_submit("a", max_tokens=1))
    thread.join(60)
    assert bench.uids() == [["a"]]


_REFUSED_START = """
import threading
from types import SimpleNamespace
import torch
from service.config.settings import SettingsError
from service.worker.worker import Worker

class Refusing(Worker):
    def __init__(self):
        self.settings = SimpleNamespace(log_level="warning", log_format="text", devices=1)
        self.state = SimpleNamespace(epoch_seconds=SimpleNamespace(value=0.0))
        self.order = SimpleNamespace(stamps={})

    def wait_until_verified(self):
        pass

    def build(self):
        computing, matrix = threading.Event(), torch.ones(1000, 1000)

        def compute():
            while True:
                torch.mm(matrix, matrix)
                computing.set()

        threading.Thread(target=compute, daemon=True).start()
        computing.wait()
        raise SettingsError("--kv-cache-memory holds too little")

Refusing().run()
"""


def test_a_failed_start_is_one_line_while_a_thread_computes() -> None:
    done = subprocess.run([sys.executable, "-c", _REFUSED_START], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (EXIT_SETTINGS, "kvasir serve: --kv-cache-memory holds too little\n")


def test_a_checkpoint_that_changes_while_it_is_loaded_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is reported when main has sent its second message: an error of main comes first."""
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"old")
    ours, theirs = socket.socketpair()
    WorkerProcess(ours, pid=None).send(pickle.dumps("verified"))

    class Overtaken(Worker):
        def __init__(self) -> None:
            self.order: Any = SimpleNamespace(stamps=stamps_of([weights]))
            self._control = theirs.fileno()

        def build(self) -> Any:
            weights.write_bytes(b"newer")
            return None, None

    def end(error: Exception, *, is_memory: bool) -> None:
        with pytest.raises(BlockingIOError):
            theirs.recv(1, socket.MSG_DONTWAIT)
        raise error

    monkeypatch.setattr(worker, "_end_start", end)
    with ours, theirs, pytest.raises(CheckpointChanged, match=r"model\.gguf has changed since the service started"):
        Overtaken()._build_or_exit()
