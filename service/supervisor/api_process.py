"""API process: LitServe's application with Kvasir's routes, forked from main.

LitServe's own `run` is not used, as it needs a manager process and ignores SIGTERM and the death of the API process.
"""

import asyncio
import logging
import multiprocessing
import pkgutil
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from threading import Semaphore
from types import FrameType
from typing import TYPE_CHECKING

from fastapi import FastAPI
from litserve import LitAPI, LitServer

from service.api.app import Frontend
from service.api.openapi import WAITING_PATHS, openapi_document
from service.config.settings import ServeSettings, SettingsError
from service.http.api_keys import ApiKeys
from service.http.connection import BoundedHttpProtocol, ConnectionLimits, limit_connections
from service.http.middleware import middlewares
from service.http.request_io import install_error_handlers
from service.ipc.shared_state import Lifecycle, Phase, name_thread
from service.metrics.recorder import Metrics
from service.preprocess.served_model import ServedModel
from service.protocol.errors import ApiError
from service.requests.engine_worker import EngineWorker
from service.supervisor.supervisor import API_CLOSE_SECONDS, TRACE_FLUSH_SECONDS, listen
from service.telemetry.request_record import Observe, RequestLog, RequestObserver, rejection

if TYPE_CHECKING:
    from service.telemetry.traces import RequestTracer

logger = logging.getLogger(__name__)

_FOREIGN_PAGES = ("/docs", "/docs/oauth2-redirect", "/redoc")
# Longer than the idle timeout of load balancers (60 s), so that the load balancer closes idle connections first.
_KEEP_ALIVE_SECONDS = 75
# Default maximum of Linux (net.core.somaxconn). While the queue is full, Linux resets some established connections.
_LISTEN_QUEUE = 4096


class _RouteOwner(LitAPI):  # type: ignore[misc]  # litserve has no types
    """LitAPI that registers Kvasir's routes and holds no model: the model is in Kvasir's worker, not in LitServe's."""

    def setup(self, device: str) -> None:
        """Load nothing: the worker holds the model."""

    async def authorize(self) -> None:
        """Allow every request: middleware checks API keys. LitServe's synchronous check costs a thread per request."""


class ApiServer(LitServer):  # type: ignore[misc]
    """LitServe application of the API process, which `start` forks from main."""

    def __init__(
        self,
        settings: ServeSettings,
        *,
        frontend: Frontend,
        workers: Sequence[EngineWorker],
        keys: ApiKeys,
        lifecycle: Lifecycle,
        observers: Sequence[Observe] = (),
        tracer: "RequestTracer | None" = None,
    ) -> None:
        super().__init__(
            _RouteOwner(spec=frontend, api_path=frontend.api_path),
            accelerator="cpu",
            timeout=False,
            middlewares=[
                *middlewares(settings, keys, frontend.count_error, WAITING_PATHS, frontend.reject_from_headers),
                *([(RequestObserver, {"observers": observers})] if observers else []),
            ],
        )
        self._observers, self._tracer = observers, tracer
        self.uvicorn_graceful_timeout = API_CLOSE_SECONDS
        self._settings, self._frontend, self._workers, self._lifecycle = settings, frontend, workers, lifecycle
        num_connections, num_lingering = limit_connections(settings.max_connections)
        self._connection_limits = ConnectionLimits(
            max_connections=num_connections,
            client_seconds=settings.client_seconds,
            max_body_bytes=settings.max_body_size,
            linger_slots=Semaphore(num_lingering),
        )
        install_error_handlers(self.app, frontend.count_error)
        self.app.openapi = openapi_document
        # FastAPI's documentation pages load scripts from other hosts.
        self.app.router.routes = [r for r in self.app.router.routes if getattr(r, "path", "") not in _FOREIGN_PAGES]

    def _register_internal_endpoints(self) -> None:
        """Register none of LitServe's routes: Kvasir has its own `/` and `/health`, and no `/info`."""

    def start(self) -> BaseProcess:
        """Fork the API process. Raises `StartError` if the port is in use, `OSError` if no process can be started."""
        with listen(self._settings.host, self._settings.port) as listener:
            processes: dict[int, BaseProcess] = self._start_server(
                self._settings.port,
                1,
                "warning",
                [listener],
                "process",
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                backlog=_LISTEN_QUEUE,
                http=partial(
                    BoundedHttpProtocol,
                    limits=self._connection_limits,
                    count=self._frontend.count_error,
                    report=self._report,
                ),
                ws="none",
                **({"log_config": None} if self._settings.log_format == "json" else {}),  # uvicorn's own: text
            )
        return processes[0]

    def _report(self, error: ApiError) -> None:
        for observe in self._observers:
            observe(rejection(error))

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Run the frontend while uvicorn serves requests. Replaces the signal handlers that uvicorn has set by now."""
        self._lifecycle.die_with_main()
        name_thread("kvasir-api")
        multiprocessing.current_process().name = "kvasir-api"  # for log lines, instead of LitServe's name
        loop = asyncio.get_running_loop()
        stop = signal.getsignal(signal.SIGTERM)
        assert callable(stop), "uvicorn handles SIGTERM"

        def on_sigterm(number: int, frame: FrameType | None) -> None:
            if self._lifecycle.phase.value == Phase.STOPPING:
                loop.call_soon_threadsafe(self._frontend.end_all)
                stop(number, frame)

        signal.signal(signal.SIGTERM, on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for worker in self._workers:
            worker.channel.deliver_to(partial(self._frontend.receive, worker=worker.index))
        if self._tracer is not None:
            self._tracer.start()
        task = asyncio.create_task(self._frontend.run_periodic_work())
        logger.info("ready: http://%s:%d", self._settings.host, self._settings.port)
        yield
        task.cancel()
        self._frontend.close()
        for worker in self._workers:
            worker.channel.close()
        if self._tracer is not None:
            self._tracer.close(TRACE_FLUSH_SECONDS)


def make_api_server(
    settings: ServeSettings, served: ServedModel, workers: Sequence[EngineWorker], keys: ApiKeys, lifecycle: Lifecycle
) -> ApiServer:
    """Create the parts of the API process. Raises `SettingsError` if a setting cannot be used."""
    metrics = Metrics(served.model_name, len(workers))
    observers, tracer = _make_observers(settings, served, metrics)
    frontend = Frontend(settings, served=served, workers=workers, lifecycle=lifecycle, metrics=metrics)
    return ApiServer(
        settings, frontend=frontend, workers=workers, keys=keys, lifecycle=lifecycle, observers=observers, tracer=tracer
    )


def _make_observers(
    settings: ServeSettings, served: ServedModel, metrics: Metrics
) -> "tuple[list[Observe], RequestTracer | None]":
    """Return the functions to call with the record of each request at its end, and the tracer of requests.

    The list is empty without JSON logs and tracing. The tracer is None without --otlp-endpoint.
    """
    if settings.log_prompts:
        logger.warning(
            "--log-prompts: the log contains the prompts and completions of all clients; restrict its readers"
        )
    endpoint = settings.otlp_endpoint
    tracer = None if endpoint is None else load_tracer(endpoint, served.model_name, metrics)
    observers: list[Observe] = [] if tracer is None else [tracer.record]
    if settings.log_format == "json":
        observers.append(RequestLog(served.model_name, served.tokenizer.decode if settings.log_prompts else None).write)
    return observers, tracer


def load_tracer(endpoint: str, model_name: str, metrics: Metrics) -> "RequestTracer":
    """Import OpenTelemetry, an optional dependency, and return a tracer that is not started yet.

    Raises SettingsError if OpenTelemetry is not installed.
    """
    try:
        return pkgutil.resolve_name("service.telemetry.traces:RequestTracer")(endpoint, model_name, metrics)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"--otlp-endpoint needs {error.name}, which is not installed; run pip install 'kvasir[traces]', "
            "or remove --otlp-endpoint and unset OTEL_EXPORTER_OTLP_ENDPOINT"
        ) from None
