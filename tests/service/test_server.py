"""Supervision and drain, with processes that only seem to live and die."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from litserve import LitServer

from service import server as server_module
from service.config.settings import ServeSettings
from service.ipc.shared_state import Phase
from service.server import KvasirServer, build_server
from service.supervisor.supervisor import StartError


@dataclass
class FakeProcess:
    exitcode: int | None
    pid: int = 2**22 + 1

    def is_alive(self) -> bool:
        return self.exitcode is None


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
    return number


@pytest.fixture
def server(tiny_checkpoint: Path, port: int) -> Iterator[KvasirServer]:
    server = build_server(ServeSettings(checkpoint=tiny_checkpoint, port=port, drain_seconds=3600))
    server._shutdown_event = threading.Event()
    server._lifecycle.enter(Phase.SERVING)
    yield server
    server._transport.close()


@pytest.fixture
def begun(server: KvasirServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How processes were begun for workers, none of which is there."""
    ways: list[str] = []
    monkeypatch.setattr(server_module.EARLY_WORKER, "begin", lambda checkpoint: ways.append("now"))
    monkeypatch.setattr(server_module.EARLY_WORKER, "begin_quietly", lambda: ways.append("quietly"))
    return ways


def die(server: KvasirServer, exitcode: int = -9) -> Any:
    dead: Any = FakeProcess(exitcode)
    return server._supervisor.replace(dead)


def test_a_dead_worker_is_replaced_and_counted(
    server: KvasirServer, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    new = FakeProcess(None)
    monkeypatch.setattr(server_module, "launch_worker", lambda *given: new)
    assert die(server) is new
    assert die(server, exitcode=1) is new
    assert server._lifecycle.epoch.value == 2
    assert begun == ["now", "now"]
    assert (server._lifecycle.num_killed.value, server._lifecycle.num_exited.value) == (1, 1)


def test_a_worker_that_dies_again_and_again_ends_the_service(
    server: KvasirServer, begun: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "launch_worker", lambda *given: FakeProcess(None))
    for _ in range(5):
        die(server)
    assert not server._shutdown_event.is_set()
    die(server)
    assert server._shutdown_event.is_set()
    assert (len(begun), server._exit_code, server._lifecycle.phase.value) == (5, 1, Phase.STOPPING)
    assert "the worker died 6 times within a minute (was killed by SIGKILL" in caplog.text


@pytest.mark.usefixtures("begun")
def test_deaths_long_ago_are_forgiven(server: KvasirServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "launch_worker", lambda *given: FakeProcess(None))
    for _ in range(20):
        die(server)
        server._supervisor._deaths[-1] -= 61.0
    assert not server._shutdown_event.is_set()


def test_no_worker_is_started_when_the_end_has_begun(server: KvasirServer, begun: list[str]) -> None:
    server._lifecycle.enter(Phase.STOPPING)
    assert die(server).exitcode == -9
    assert begun == []


def test_a_drain_waits_for_the_last_request(server: KvasirServer) -> None:
    server._lifecycle.num_active.value = 1
    server._on_signal(signal.SIGTERM, None)
    assert server._lifecycle.phase.value == Phase.DRAINING
    assert not server._shutdown_event.wait(0.2)
    server._lifecycle.num_active.value = 0
    assert server._shutdown_event.wait(60)
    assert (server._lifecycle.phase.value, server._exit_code) == (Phase.STOPPING, 0)


def test_a_drain_ends_when_its_time_is_over(server: KvasirServer) -> None:
    server._settings = server._settings.model_copy(update={"drain_seconds": 0.05})
    server._lifecycle.num_active.value = 1
    server._on_signal(signal.SIGTERM, None)
    assert server._shutdown_event.wait(60)
    assert (server._lifecycle.phase.value, server._exit_code) == (Phase.STOPPING, 0)


def test_a_second_signal_ends_the_drain(server: KvasirServer) -> None:
    server._lifecycle.num_active.value = 1
    server._on_signal(signal.SIGTERM, None)
    server._on_signal(signal.SIGTERM, None)
    assert server._shutdown_event.wait(60)


def test_forked_children_ignore_the_handler_they_inherit(server: KvasirServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: server._lifecycle.main_pid + 1)
    server._on_signal(signal.SIGTERM, None)
    assert server._lifecycle.phase.value == Phase.SERVING


def test_a_signal_while_starting_is_left_to_the_start(server: KvasirServer) -> None:
    server._lifecycle.phase.value = Phase.STARTING
    server._on_signal(signal.SIGTERM, None)
    assert server._lifecycle.phase.value == Phase.DRAINING
    assert not server._shutdown_event.is_set()


def test_a_signal_between_the_worker_and_the_api_process_still_drains(
    server: KvasirServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LitServer, "_start_server", lambda *args: {0: FakeProcess(None)})
    monkeypatch.setattr(server, "_watch", lambda api_process: None)
    server._lifecycle.phase.value = Phase.STARTING
    server._on_signal(signal.SIGTERM, None)
    server._start_server()
    assert server._shutdown_event.wait(60)
    assert (server._lifecycle.phase.value, server._exit_code) == (Phase.STOPPING, 0)


def test_no_page_loads_scripts_from_elsewhere(server: KvasirServer) -> None:
    paths = {getattr(route, "path", "") for route in server.app.router.routes}
    assert "/openapi.json" in paths
    assert not paths & {"/docs", "/redoc"}


def test_the_death_of_the_api_process_ends_the_service(server: KvasirServer) -> None:
    dead: Any = FakeProcess(exitcode=-11)
    server._supervisor.watch(api=dead, worker=lambda: dead)
    assert (server._exit_code, server._lifecycle.phase.value) == (1, Phase.STOPPING)


def test_who_hangs_is_killed_before_anybody_waits_for_it(server: KvasirServer) -> None:
    asked: list[Phase] = []

    class Hung(FakeProcess):
        def kill(self) -> None:
            asked.append(Phase(server._lifecycle.phase.value))
            assert not server._shutdown_event.is_set()

    hung: Any = Hung(None)
    server._fail("it gave no sign of life", hung)
    assert asked == [Phase.STOPPING]
    assert (server._exit_code, server._shutdown_event.is_set()) == (1, True)


def test_a_taken_port_is_found_before_anything_is_loaded(tiny_checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is in use"):
            build_server(ServeSettings(checkpoint=tiny_checkpoint / "none", port=port))


def test_a_standby_imports_when_nobody_else_computes(
    server: KvasirServer, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a worker that is needed now does not."""
    standby, needed_now = FakeProcess(None, pid=1), FakeProcess(None, pid=2)
    words: list[Any] = []

    def launch(api: Any, *given: Any) -> FakeProcess:
        if api.word is None:
            return needed_now
        assert begun == ["quietly"]
        words.append(Connection(os.dup(api.word.fileno())))  # as its process has it
        words[0].send_bytes(b"imported")
        return standby

    monkeypatch.setattr(server_module, "launch_worker", launch)
    server._supervisor._standby.keep()
    (word,) = words
    assert (die(server), die(server)) == (standby, needed_now)
    assert begun == ["quietly", "now"]
    assert word.recv_bytes() == b"begin"
    word.close()


def test_the_start_waits_for_the_worker(server: KvasirServer) -> None:
    worker: Any = FakeProcess(None)
    server.inference_workers = [worker]
    done = threading.Event()
    thread = threading.Thread(target=lambda: (server.verify_worker_status(), done.set()))
    thread.start()
    assert not done.wait(0.1)
    server._lifecycle.ready_epoch.value = 0
    assert done.wait(60)
    thread.join()
