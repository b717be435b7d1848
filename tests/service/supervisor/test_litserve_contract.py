"""Undocumented parts of LitServe that `service.supervisor.api_process` overrides or calls."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import litserve.server
import pytest
from litserve import LitAPI, LitServer
from litserve.specs.base import LitSpec
from starlette.testclient import TestClient


class OneRouteSpec(LitSpec):  # type: ignore[misc]  # litserve has no types
    def __init__(self) -> None:
        super().__init__()
        self.api_path = "/v1/things"

    @property
    def stream(self) -> bool:
        return True

    def pre_setup(self, lit_api: Any) -> None:
        self.add_endpoint("/v1/things", self.things, ["GET"])

    async def things(self) -> dict[str, int]:
        return {"things": 1}


class NoSetupApi(LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        """Do nothing."""


class OverridingServer(LitServer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.lifespan_events: list[str] = []
        super().__init__(NoSetupApi(spec=OneRouteSpec(), api_path="/v1/things"), accelerator="cpu", timeout=False)
        self.uvicorn_graceful_timeout = 7

    def _register_internal_endpoints(self) -> None:
        """Register nothing."""

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        self.lifespan_events.append("begin")
        yield
        self.lifespan_events.append("end")


class UnstartedProcess:
    def __init__(self, target: Any, args: tuple[object, ...], name: str) -> None:
        self.server, self.args, self.is_started = target.__self__, args, False

    def start(self) -> None:
        self.is_started = True


def test_an_overridden_lifespan_replaces_the_lifespan_of_litserve() -> None:
    server = OverridingServer()
    with TestClient(server.app) as client:
        assert server.lifespan_events == ["begin"]
        assert client.get("/v1/things").json() == {"things": 1}
    assert server.lifespan_events == ["begin", "end"]


def test_an_overridden_registration_removes_the_routes_of_litserve() -> None:
    with TestClient(OverridingServer().app) as client:
        assert [client.get(path).status_code for path in ("/", "/health", "/info")] == [404] * 3


def test_start_server_forks_one_process_with_the_given_socket_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    server, methods = OverridingServer(), list[str]()

    def get_context(method: str) -> SimpleNamespace:
        methods.append(method)
        return SimpleNamespace(Process=UnstartedProcess)

    monkeypatch.setattr(litserve.server.mp, "get_context", get_context)
    with socket.socket() as listener:
        options: dict[str, Any] = {"access_log": False, "server_header": False, "timeout_keep_alive": 75}
        processes = server._start_server(1, 1, "warning", [listener], "process", **options)
        assert list(processes) == [0]
        assert (processes[0].args, processes[0].is_started) == ((0, [listener]), True)
    assert methods == ["fork"]
    config = processes[0].server.config
    assert (config.timeout_graceful_shutdown, config.timeout_keep_alive, config.access_log) == (7, 75, False)
