"""The first worker's process begins before its order: it is what it was told, and none is left that nobody wants."""

import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.popen_spawn_posix import Popen as SpawnPopen
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from litserve import LitServer

from service.supervisor import worker_launch
from service.supervisor.prespawned_worker import EarlyWorker, read_ahead
from service.supervisor.worker_launch import EarlyProcess, launch_worker
from tests.interrupted import interrupting_environment

VARIABLE = "KVASIR_TEST_OF_EARLY_WORKERS"
NOTES_ITS_PRIORITY = "notes_its_priority"
PATIENCE_SECONDS = 60.0


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[EarlyWorker]:
    """Stands in for main's, and imports next to nothing."""
    worker = EarlyWorker(imports=("json", "there.is.no.such.module"))
    monkeypatch.setattr(worker_launch, "EARLY_WORKER", worker)
    yield worker
    worker.end()


def begun(worker: EarlyWorker, checkpoint: Path) -> psutil.Process:
    before = {child.pid for child in psutil.Process().children()}
    worker.begin(checkpoint)
    (process,) = (child for child in psutil.Process().children() if child.pid not in before)
    return process


def tell(answers: Connection, code: int) -> None:
    """What the process does here."""
    is_deaf = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    answers.send((os.getpid(), os.environ.get(VARIABLE), is_deaf, gc.isenabled()))
    sys.exit(code)


def started(code: int) -> tuple[EarlyProcess, Connection]:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = EarlyProcess(target=tell, args=(theirs, code))
    process.start()
    theirs.close()
    return process, ours


def test_it_is_what_it_was_told(early: EarlyWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Objects, file descriptors, and the environment as it is by then."""
    waiting = begun(early, tmp_path)
    monkeypatch.setenv(VARIABLE, "set later, \N{SNOWMAN}")
    process, answers = started(7)
    assert process.pid == waiting.pid
    assert answers.recv() == (waiting.pid, "set later, \N{SNOWMAN}", True, True)
    assert connection.wait([process.sentinel], PATIENCE_SECONDS) == [process.sentinel]
    process.join()
    assert process.exitcode == 7


def test_an_interrupt_while_it_begins_does_not_end_it(
    early: EarlyWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in a terminal reaches it before it can ignore SIGINT."""
    for name, value in interrupting_environment(tmp_path, "service.supervisor.prespawned_worker").items():
        monkeypatch.setenv(name, value)
    waiting = begun(early, tmp_path)
    process, answers = started(7)
    assert answers.recv() == (waiting.pid, None, True, True)
    process.join()
    assert process.exitcode == 7
    assert capfd.readouterr().err == ""


def tell_priorities(answers: Connection) -> None:
    """The one with which modules were imported there, and its own."""
    at_import = importlib.import_module(NOTES_ITS_PRIORITY).PRIORITY
    answers.send((at_import, os.getpriority(os.PRIO_PROCESS, 0)))


def test_one_that_nobody_waits_for_yet_imports_last_and_is_then_as_all_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"{NOTES_ITS_PRIORITY}.py").write_text(
        "import os, threading; PRIORITY = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())"
    )
    monkeypatch.syspath_prepend(tmp_path)
    worker = EarlyWorker(imports=(NOTES_ITS_PRIORITY,))
    monkeypatch.setattr(worker_launch, "EARLY_WORKER", worker)
    worker.begin_quietly()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = EarlyProcess(target=tell_priorities, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.recv() == (19, os.getpriority(os.PRIO_PROCESS, 0))
    process.join()


def tell_variable(answers: Connection) -> None:
    answers.send(len(os.environ[VARIABLE]))


def test_nobody_waits_for_one_that_imports_for_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However much it is told: an environment may be larger than what a socket holds."""
    (tmp_path / "imports_for_long.py").write_text(f"with open({str(tmp_path / 'go')!r}, 'rb') as go: go.read(1)")
    os.mkfifo(tmp_path / "go")
    go = os.open(tmp_path / "go", os.O_RDWR)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, "x" * 120_000)
    for number in range(10):
        monkeypatch.setenv(f"{VARIABLE}_{number}", "x" * 120_000)
    worker = EarlyWorker(imports=("imports_for_long",))
    monkeypatch.setattr(worker_launch, "EARLY_WORKER", worker)
    worker.begin_quietly()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = EarlyProcess(target=tell_variable, args=(theirs,))
    try:
        process.start()
        while psutil.Process(process.pid).name() != "kvasir-importer":
            pass
    finally:
        os.write(go, b"x")
    theirs.close()
    assert ours.poll(PATIENCE_SECONDS)
    assert ours.recv() == 120_000
    os.close(go)
    process.join()
    assert process.exitcode == 0


def test_two_that_wait_for_its_end_learn_it_one_after_the_other(
    early: EarlyWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel tells one of them alone: the other is not to look before that one has said it."""
    begun(early, tmp_path)
    process, _ = started(7)
    told, inside = threading.Event(), []
    poll = SpawnPopen.poll

    def slow(self: Any, flag: int = os.WNOHANG) -> int | None:
        inside.append(threading.get_ident())
        code = poll(self, 0)
        assert told.wait(PATIENCE_SECONDS)
        return code

    monkeypatch.setattr(SpawnPopen, "poll", slow)
    threads = [threading.Thread(target=process.join) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not inside:
        pass
    assert not worker_launch.EARLY_WORKER.take()
    assert len(inside) == 1
    told.set()
    for thread in threads:
        thread.join()
    assert process.exitcode == 7


def test_it_is_taken_once(early: EarlyWorker, tmp_path: Path) -> None:
    """Who comes after, or finds none, gets a new process."""
    waiting = begun(early, tmp_path)
    first, _ = started(0)
    second, answers = started(3)
    assert first.pid == waiting.pid
    assert answers.recv()[0] == second.pid
    for process in (first, second):
        process.join()
    assert (first.exitcode, second.exitcode) == (0, 3)


def test_one_that_dies_before_its_order_is_seen_dead(early: EarlyWorker, tmp_path: Path) -> None:
    waiting = begun(early, tmp_path)
    waiting.kill()
    while waiting.status() != psutil.STATUS_ZOMBIE:
        pass
    process, _ = started(0)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_one_that_nobody_wants_is_ended(early: EarlyWorker, tmp_path: Path) -> None:
    waiting = begun(early, tmp_path)
    early.end()
    assert not waiting.is_running()
    early.end()  # there is none


def test_it_ends_with_main(tmp_path: Path) -> None:
    """Also with one that is killed."""
    program = (
        "import sys; from pathlib import Path; from service.supervisor.prespawned_worker import EarlyWorker;"
        "EarlyWorker(imports=()).begin(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as main:
        assert main.stdout is not None
        main.stdout.readline()
        (child,) = psutil.Process(main.pid).children()
        main.kill()
        assert psutil.wait_procs([child], PATIENCE_SECONDS)[1] == []


@pytest.mark.parametrize("wanted", ["multiprocessing.util.spawnv_passfds", "socket.socketpair"])
def test_no_more_are_to_be_had(wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: Any) -> int:
        raise BlockingIOError

    worker = EarlyWorker()
    monkeypatch.setattr(wanted, refuse)
    worker.begin(tmp_path)
    assert worker.take() is None


def test_the_weights_are_read_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regular files alone: to open a pipe may never end."""
    paths = [tmp_path / f"model-{number}.safetensors" for number in range(2)]
    for path in (*paths, tmp_path / "manifest.json"):
        path.write_bytes(b"weights")
    os.mkfifo(tmp_path / "pipe.safetensors")
    told: list[Path] = []

    def advise(descriptor: int, *_: int) -> None:
        told.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    read_ahead(tmp_path)
    read_ahead(tmp_path / "nowhere")
    assert told == paths
    monkeypatch.setattr(os, "sysconf", lambda name: 1)  # of memory there is one byte
    read_ahead(tmp_path)
    assert told == paths


def test_litserves_worker_gets_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What LitServe's own way to launch a worker passes, ours does."""
    orders: list[dict[str, Any]] = []

    def process(**order: Any) -> SimpleNamespace:
        orders.append(order)
        return SimpleNamespace(start=lambda: None)

    api: Any = SimpleNamespace(api_path="/v1/completions", spec=None)
    statuses: dict[str, Any] = {}
    server = SimpleNamespace(
        _inference_workers_config_for_api=lambda path: ["cpu"],
        _get_request_queue=lambda path: None,
        _transport="transport",
        workers_setup_status=statuses,
        _callback_runner="callbacks",
        restart_workers=True,
    )
    context: Callable[[str], Any] = lambda kind: SimpleNamespace(Process=process)  # noqa: E731
    monkeypatch.setattr("litserve.server.mp.get_context", context)
    LitServer.launch_inference_worker(server, api)
    monkeypatch.setattr(worker_launch, "EarlyProcess", process)
    others: list[Any] = ["transport", "callbacks"]
    launch_worker(api, *others)
    theirs, ours = orders
    assert [{} if part is statuses else part for part in theirs["args"]] == list(ours["args"])
    assert {**theirs, "args": ()} == {**ours, "args": ()}
