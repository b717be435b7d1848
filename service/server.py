"""Composition root: LitServe with Kvasir's API, engine loop and routes, plus supervision and draining.

LitServe does not handle SIGTERM. It restarts workers without their requests, and does not notice the death of its API
process. Its manager process with its queues is not started: commands and events pass through sockets. This module adds
the missing parts and handles no tokens.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType, SimpleNamespace
from typing import Any

from fastapi import FastAPI
from litserve import LitServer

from model.checkpoint.manifest import read_manifest
from service.api.app import Frontend
from service.api.openapi import openapi_document
from service.config.settings import ServeSettings
from service.http.api_keys import ApiKeys, read_api_keys
from service.http.connection import BoundedHttpProtocol, ConnectionLimits, limit_connections
from service.http.middleware import middlewares
from service.http.request_io import install_error_handlers
from service.ipc.channel import Channel
from service.ipc.shared_state import Lifecycle, Phase, name_process
from service.metrics.recorder import Metrics
from service.preprocess.served_model import read_served_model
from service.supervisor.preflight import check_machine, check_port
from service.supervisor.prespawned_worker import EARLY_WORKER
from service.supervisor.supervisor import StartError, Supervisor, failed_start
from service.supervisor.worker_launch import launch_worker
from service.worker.worker import EngineAPI, WorkerLoop

logger = logging.getLogger(__name__)

_FOREIGN_PAGES = ("/docs", "/docs/oauth2-redirect", "/redoc")
# Longer than the idle timeout of load balancers (60 s), so that the load balancer closes idle connections first.
_KEEP_ALIVE_SECONDS = 75
# Time limit for the API process to close connections after the drain.
_CLOSE_SECONDS = 5


class KvasirServer(LitServer):  # type: ignore[misc]  # litserve has no types
    """LitServe server with supervision. `serve()` blocks until the service has ended and returns its exit code."""

    def __init__(
        self,
        api: EngineAPI,
        *,
        frontend: Frontend,
        channel: Channel,
        settings: ServeSettings,
        keys: ApiKeys,
        lifecycle: Lifecycle,
    ) -> None:
        # accelerator: LitServe starts one worker per device. The worker, which has torch, resolves --device itself.
        super().__init__(
            api,
            accelerator="cpu",
            timeout=False,
            restart_workers=True,
            middlewares=middlewares(settings, keys, frontend.count_error, frontend.reject_from_headers),
        )
        self.uvicorn_graceful_timeout = _CLOSE_SECONDS
        self._frontend = frontend
        self._transport = channel
        self._settings = settings
        self._connection_limits = ConnectionLimits(
            max_connections=limit_connections(settings.max_connections),
            client_seconds=settings.client_seconds,
            max_body_bytes=settings.max_body_size,
        )
        self._lifecycle = lifecycle
        self._hurry = threading.Event()
        self._exit_code = 0
        self._supervisor = Supervisor(
            lifecycle,
            launch=self._launch,
            fail=self._fail,
            has_standby=settings.standby,
            hang_seconds=settings.hang_seconds,
        )
        install_error_handlers(self.app, frontend.count_error)
        self.app.openapi = openapi_document
        # FastAPI's documentation pages load scripts from other hosts.
        self.app.router.routes = [r for r in self.app.router.routes if getattr(r, "path", "") not in _FOREIGN_PAGES]

    def serve(self) -> int:
        """Run until a signal or a failure ends the service. Return 0 after a drain, 1 after a failure.

        Raises:
            StartError: the service could not start.
        """
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        self._lifecycle.epoch_seconds.value = time.monotonic()
        os.register_at_fork(after_in_child=self._lifecycle.die_with_main)
        try:
            self.run(
                host=self._settings.host,
                port=self._settings.port,
                num_api_servers=1,
                log_level="warning",
                generate_client_file=False,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                http=partial(BoundedHttpProtocol, limits=self._connection_limits, count=self._frontend.count_error),
            )
        except _StoppedWhileStarting:
            return 0
        except OSError as error:  # such as a limit of processes
            self._fail(f"the service cannot run: {error}")
        finally:
            self._end_children()
        return self._exit_code

    def _end_children(self) -> None:
        """Kill the child processes that LitServe has left, since Python would wait for them at exit."""
        self._lifecycle.enter(Phase.STOPPING)
        self._supervisor.end()
        for child in multiprocessing.active_children():
            child.kill()
            child.join()

    # Start.

    def _register_internal_endpoints(self) -> None:
        """Register nothing: Kvasir's own routes replace LitServe's `/`, `/health` and `/info`."""

    def _init_manager(self, num_api_servers: int) -> Any:
        """Make what LitServe's `run` needs, without LitServe's manager process."""
        self.workers_setup_status: dict[str, str] = {}
        self._shutdown_event = threading.Event()  # only this process uses the event
        return SimpleNamespace(shutdown=lambda: None)

    def _get_request_queue(self, api_path: str) -> None:
        """Return no queue: commands pass through the channel."""

    def launch_inference_worker(self, lit_api: EngineAPI) -> list[BaseProcess]:
        """Start the first worker in the prespawned process, instead of a new process that has imported nothing."""
        return [launch_worker(lit_api, self._transport, self._callback_runner)]

    def verify_worker_status(self) -> None:
        """Wait until the worker is ready. A worker that fails prints the reason in one line and exits.

        Raises:
            StartError: the worker ended.
            _StoppedWhileStarting: SIGTERM or SIGINT arrived.
        """
        while self._lifecycle.ready_epoch.value < 0:
            if self._lifecycle.phase.value >= Phase.DRAINING:
                self._abandon_start()
                raise _StoppedWhileStarting
            if dead := [worker for worker in self.inference_workers if not worker.is_alive()]:
                self._abandon_start()
                raise failed_start(dead[0])
            time.sleep(0.02)

    def _abandon_start(self) -> None:
        self._lifecycle.enter(Phase.STOPPING)
        for worker in self.inference_workers:
            worker.terminate()
            worker.join()

    def _start_server(self, *args: Any, **kwargs: Any) -> dict[int, BaseProcess]:
        if self._lifecycle.phase.value == Phase.STARTING:
            self._lifecycle.enter(Phase.SERVING)
        processes: dict[int, BaseProcess] = super()._start_server(*args, **kwargs)
        threading.Thread(target=self._watch, args=(processes[0],), name="watch", daemon=True).start()
        if self._lifecycle.phase.value == Phase.DRAINING:  # the signal came between worker start and API start
            threading.Thread(target=self._drain, name="drain", daemon=True).start()
        return processes

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """The API process, around its requests. uvicorn has set its signal handlers by now."""
        name_process("kvasir-api")
        loop = asyncio.get_running_loop()
        stop = signal.getsignal(signal.SIGTERM)
        assert callable(stop), "uvicorn handles SIGTERM"

        def on_sigterm(number: int, frame: FrameType | None) -> None:
            if self._lifecycle.phase.value == Phase.STOPPING:
                loop.call_soon_threadsafe(self._frontend.end_all)
                stop(number, frame)

        signal.signal(signal.SIGTERM, on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        async with super().lifespan(app):
            self._transport.deliver_to(self._frontend.receive)
            task = asyncio.create_task(self._frontend.tend())
            logger.info("ready: http://%s:%d", self._settings.host, self._settings.port)
            yield
            task.cancel()
            self._frontend.close()

    # Supervision.

    def _start_worker_monitoring(self, *args: Any) -> None:
        """Monitor the worker, in place of LitServe's own monitor."""
        replace = partial(self._supervisor.keep_worker, self.inference_workers)
        threading.Thread(target=replace, name="replace", daemon=True).start()

    def _launch(self, epoch: int, word: Connection | None = None) -> BaseProcess:
        """Start the worker of an epoch. With `word`, start a standby that waits for a message on this connection."""
        self.lit_api.word = word
        if word is None:
            EARLY_WORKER.begin(self._settings.checkpoint)
        else:
            EARLY_WORKER.begin_quietly()
        return launch_worker(self.lit_api, self._transport, self._callback_runner)

    def _watch(self, api_process: BaseProcess) -> None:
        """Supervise the child processes until main ends.

        This thread must not end earlier: its children die with it, see `Lifecycle.die_with_main`.
        """
        self._supervisor.keep_watch(api=api_process, worker=lambda: self.inference_workers[0])

    def _fail(self, message: str, hung: BaseProcess | None = None) -> None:
        logger.error("%s", message)
        self._exit_code = 1
        if hung is not None:
            # Before the kill, lest another thread reports this death with another cause.
            self._lifecycle.enter(Phase.STOPPING)
            hung.kill()
        self._stop()

    # Shutdown.

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Drain on the first signal, stop on the second. Do nothing in forked children, which inherit this handler."""
        if os.getpid() != self._lifecycle.main_pid:
            return
        if self._lifecycle.phase.value >= Phase.DRAINING:
            self._hurry.set()
            return
        is_serving = self._lifecycle.phase.value == Phase.SERVING
        self._lifecycle.enter(Phase.DRAINING)
        if is_serving:
            threading.Thread(target=self._drain, name="drain", daemon=True).start()

    def _drain(self) -> None:
        logger.info("draining: %s", _requests(self._lifecycle.num_active.value, "running"))
        deadline = time.monotonic() + self._settings.drain_seconds
        while self._lifecycle.num_active.value and time.monotonic() < deadline and not self._hurry.wait(0.02):
            pass
        logger.info("stopping: %s", _requests(self._lifecycle.num_active.value, "cut off"))
        self._stop()

    def _stop(self) -> None:
        """Wake `run`. LitServe then ends the API process and the workers, in that order."""
        self._lifecycle.enter(Phase.STOPPING)
        self._shutdown_event.set()


class _StoppedWhileStarting(Exception):
    """A signal arrived before the service was up."""


def build_server(settings: ServeSettings, *, engine_api: type[EngineAPI] = EngineAPI) -> KvasirServer:
    """Build the server and all its parts, without starting a process.

    Args:
        engine_api: class that builds the engine in the worker.

    Raises:
        CheckpointError, TokenizerError, ChatTemplateError, GenerationConfigError: the checkpoint cannot be used. The
            message is one line.
        SettingsError: --max-context-length is over the model's positions, the API keys cannot be used, or the limit
            of open files is too low.
        StartError: the port is in use, or the machine lacks shared memory.
    """
    if (fault := check_machine()) is not None:
        raise StartError(fault)
    if (fault := check_port(settings.host, settings.port)) is not None:
        raise StartError(fault)
    keys = read_api_keys(settings)
    manifest = read_manifest(settings.checkpoint)
    serving = read_served_model(settings, manifest, manifest.verify())
    for warning in (*keys.warnings, *serving.warnings()):
        logger.warning("%s", warning)
    metrics = Metrics(serving.model_name)
    lifecycle = Lifecycle(main_pid=os.getpid())
    channel = Channel()
    frontend = Frontend(settings, served=serving, channel=channel, lifecycle=lifecycle, metrics=metrics)
    api = engine_api(
        settings,
        manifest=manifest,
        found={**serving.found(settings), "api_keys": keys},
        lifecycle=lifecycle,
        loop=WorkerLoop(),
        spec=frontend,
    )
    return KvasirServer(api, frontend=frontend, channel=channel, settings=settings, keys=keys, lifecycle=lifecycle)


def _requests(number: int, state: str) -> str:
    counted = {0: "no request is", 1: "1 request is"}.get(number, f"{number} requests are")
    return f"{counted} {state}"
