"""Fixtures of the service's unit tests: the HTTP application in the test process, and a worker that echoes prompts."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from model.checkpoint.manifest import read_manifest
from model.tokenizer.byte_level import ByteLevelTokenizer
from model.tokenizer.files import load_tokenizer
from service.api.app import Frontend
from service.api.openapi import WAITING_PATHS
from service.config.settings import ServeSettings
from service.http.api_keys import read_api_keys
from service.http.middleware import middlewares
from service.http.request_io import install_error_handlers
from service.ipc.shared_state import Lifecycle, Phase, WorkerState
from service.metrics.recorder import Metrics
from service.preprocess.served_model import read_served_model
from service.requests.engine_worker import EngineWorker
from service.telemetry.request_record import Observe, RequestObserver
from tests.service.echo import EchoChannel
from tests.service.kept_process import KeptProcess
from tests.tiny_model import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> ByteLevelTokenizer:
    return tiny_tokenizer()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("tiny")


@pytest.fixture
def queue() -> EchoChannel:
    return EchoChannel()


@pytest.fixture
def lifecycle() -> Lifecycle:
    lifecycle = Lifecycle(main_pid=os.getppid())
    lifecycle.enter(Phase.SERVING)
    return lifecycle


@pytest.fixture
def settings(tiny_checkpoint: Path) -> ServeSettings:
    """Return default settings. A test module that needs other settings overrides this fixture."""
    return ServeSettings(checkpoint=tiny_checkpoint, max_num_running=2, max_waiting_requests=2)


@pytest.fixture(scope="module")
def kept_processes() -> Iterator[None]:
    """End the kept child processes after the tests of a module."""
    yield
    KeptProcess.end_all()


@pytest.fixture
def worker_state() -> WorkerState:
    return WorkerState()


@pytest.fixture
def frontend(
    settings: ServeSettings,
    metrics: Metrics,
    lifecycle: Lifecycle,
    worker_state: WorkerState,
    queue: EchoChannel,
    kept_processes: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Frontend]:
    for module in ("preprocess.template_process", "structured_output.compiler"):
        monkeypatch.setattr(f"service.{module}.BoundedProcess", KeptProcess)
    serving = read_served_model(settings, read_manifest(settings.checkpoint), load_tokenizer(settings.checkpoint))
    channel: Any = queue
    workers = [EngineWorker(channel, worker_state)]
    frontend = Frontend(settings, served=serving, workers=workers, lifecycle=lifecycle, metrics=metrics)
    frontend.pre_setup(None)
    queue.frontend = frontend
    yield frontend
    frontend.close()


@pytest.fixture
def observers() -> list[Observe]:
    """Return the functions that get the record of each request. A test module that has some overrides this fixture."""
    return []


@pytest.fixture
def client(frontend: Frontend, settings: ServeSettings, observers: list[Observe]) -> Iterator[TestClient]:
    app = FastAPI()
    keys = read_api_keys(settings)
    middleware: list[tuple[Any, dict[str, Any]]] = [
        *middlewares(settings, keys, frontend.count_error, WAITING_PATHS, frontend.reject_from_headers),
        *([(RequestObserver, {"observers": observers})] if observers else []),
    ]
    for kind, arguments in middleware:
        app.add_middleware(kind, **arguments)
    install_error_handlers(app, frontend.count_error)
    for path, endpoint, methods in frontend.endpoints:
        app.add_api_route(path, endpoint, methods=methods)
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client
