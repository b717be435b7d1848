"""API process: composition of the routes, periodic work, messages of the worker. Imports no torch.

LitServe runs this spec in the API process. One LitAPI and one worker serve all routes. Commands and events pass through
`service.ipc.channel`, with one message of events per engine step.
"""

import asyncio
import gc
import importlib.metadata
import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from fastapi.responses import HTMLResponse, Response
from litserve.specs.base import LitSpec
from starlette.requests import Request
from starlette.types import Scope

from service.admission.controller import Admission, read_queue_policy
from service.api.attention import Inspection
from service.api.completions import Completions
from service.api.context import ApiContext
from service.api.embeddings import Embeddings
from service.api.openapi import ROUTES
from service.api.tokenization import TokenizerRoutes
from service.config.settings import ServeSettings
from service.http.request_io import json_response
from service.ipc.channel import Channel
from service.ipc.messages import API_PATH, Command, CommandBatch, WorkerReady, decode_events, encode_commands
from service.ipc.shared_state import Lifecycle
from service.metrics.recorder import EngineState, Metrics
from service.preprocess.served_model import ServedModel
from service.protocol import responses
from service.protocol.errors import ApiError, Draining, Overloaded
from service.requests.engine_client import EngineClient

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
# Interval of the periodic work. A queue timeout takes effect at most this much too late.
_TICK_SECONDS = 1.0
_PLAYGROUND = Path(__file__).parent / "playground" / "index.html"


class Frontend(LitSpec):  # type: ignore[misc]  # litserve has no types
    """Routes and state of the API process."""

    def __init__(
        self,
        settings: ServeSettings,
        *,
        served: ServedModel,
        channel: Channel,
        lifecycle: Lifecycle,
        metrics: Metrics,
    ) -> None:
        super().__init__()
        self.api_path = API_PATH
        self.model_name = served.model_name
        self._channel = channel
        self._metrics = metrics
        self._epoch = 0  # of the worker that gets the commands
        admission = Admission(
            max_num_running=settings.max_num_running,
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
            observe_error=metrics.observe_retry_after_error,
        )
        engine_client = EngineClient(
            send=self._send,
            admission=admission,
            on_worker_ready=self._set_worker,
            on_engine=metrics.observe_engine,
            on_replay=metrics.count_replay,
            on_late=partial(metrics.count_wasted_tokens, "cancelled"),
            on_count=partial(setattr, lifecycle.num_active, "value"),  # a drain waits for 0
        )
        self.context = context = ApiContext(
            settings, served, admission=admission, engine_client=engine_client, lifecycle=lifecycle, metrics=metrics
        )
        self.completions = Completions(context)
        self.embeddings = Embeddings(context)
        self.inspection = Inspection(context)
        self.tokenizer_routes = TokenizerRoutes(context)

    @property
    def stream(self) -> bool:
        """Always True, so that LitServe passes every message on at once."""
        return True

    def pre_setup(self, lit_api: Any) -> None:
        """Register the routes."""
        for route in ROUTES:
            if route.handler:
                self.add_endpoint(route.path, attrgetter(route.handler)(self), route.methods)

    def decode_request(self, request: Any, context_kwargs: Any) -> Any:
        """Not used: the worker's loop reads commands."""
        raise AssertionError("only LitServe's built-in loops call this")

    def encode_response(self, output: Any, context_kwargs: Any) -> Any:
        """Not used: the worker's loop writes events."""
        raise AssertionError("only LitServe's built-in loops call this")

    # Routes without request bodies.

    async def models(self) -> Response:
        """Handle `GET /v1/models`."""
        names = (self.model_name, *self.context.settings.model_alias)
        return json_response(responses.ModelList(data=[self._model_card(name) for name in names]))

    async def model(self, model_id: str) -> Response:
        """Handle `GET /v1/models/{id}`."""
        self.context.processor.check_model(model_id)
        return json_response(self._model_card(model_id))

    def _model_card(self, name: str) -> responses.ModelCard:
        served = self.context.served
        return responses.ModelCard(
            id=name,
            created=served.manifest.created_seconds,
            owned_by="kvasir",
            max_model_len=served.max_context_length,
        )

    async def health(self) -> Response:
        """Handle `GET /health`: 200 while this process responds."""
        return json_response(responses.Health())

    async def ready(self) -> Response:
        """Handle `GET /ready`: 200 if a request would be served now, else 503 with Retry-After."""
        readiness = self.context.readiness()
        if readiness.state == "ready":
            return json_response(readiness)
        retry_after = str(max(1, math.ceil(readiness.eta_s or 1.0)))
        return json_response(readiness, 503, {"retry-after": retry_after})

    async def version(self) -> Response:
        """Handle `GET /version`."""
        return json_response(responses.Version(version=importlib.metadata.version("kvasir")))

    async def metrics(self) -> Response:
        """Handle `GET /metrics`. Renders in a thread, because rendering takes milliseconds."""
        lifecycle = self.context.lifecycle
        if lifecycle.ready_epoch.value != lifecycle.epoch.value:
            self._metrics.forget_engine()
        state = self.context.readiness().state
        if state == "loading":
            self._metrics.set_engine_state(
                EngineState.STARTING if self.context.worker is None else EngineState.RESTARTING
            )
        else:
            self._metrics.set_engine_state(EngineState(state))
        self._metrics.set_worker_restarts(signal=lifecycle.num_killed.value, exit=lifecycle.num_exited.value)
        self._metrics.observe_api(num_requests=lifecycle.num_active.value, num_tasks=len(asyncio.all_tasks()))
        body, content_type = await asyncio.to_thread(self._metrics.render)
        return Response(body, headers={"content-type": content_type})

    async def playground(self) -> Response:
        """Handle `GET /playground` and `GET /`: the page to try the model."""
        return HTMLResponse(_PLAYGROUND.read_bytes())

    # Periodic work and shutdown.

    async def run_periodic_work(self) -> None:
        """Do the periodic work: heartbeat, keep-alives, queue timeouts, metrics; exit if main is gone."""
        context = self.context
        gc.freeze()  # scanning the startup objects for garbage would stall every stream
        while True:
            context.lifecycle.record_api_heartbeat()
            await asyncio.sleep(_TICK_SECONDS)
            context.lifecycle.end_if_orphaned()
            context.response_store.discard_expired()
            context.engine_client.wake_silent_requests(since_seconds=time.monotonic() - KEEP_ALIVE_SECONDS)
            context.engine_client.expire(time.monotonic(), is_stalled=context.readiness().state == "stalled")

    def close(self) -> None:
        """Close the helpers that this process started."""
        self.context.chat.close()
        self.completions.close()
        self.context.response_store.close()

    def end_all(self) -> None:
        """Fail all unfinished requests, because the drain time is over."""
        self.context.engine_client.fail_all(Draining("the server is shutting down", retry_after_seconds=1.0))

    def receive(self, message: bytes) -> None:
        """Process one message of a worker. Never raises; an error fails all requests."""
        try:
            self.context.engine_client.receive(decode_events(message))
        except Exception:
            logger.exception("a message of the worker could not be processed; all requests fail")
            self.context.engine_client.fail_all(ApiError("internal error"))

    def count_error(self, error: ApiError) -> None:
        """Count a request that was rejected or failed."""
        if isinstance(error, Overloaded | Draining):
            self._metrics.count_rejection(error.code)
        else:
            self._metrics.count_failure(error.status, error.type)

    def reject_from_headers(self, scope: Scope) -> None:
        """Reject a request by its headers, if no request body (except a `timeout`) could change the rejection.

        Raises:
            Draining, Overloaded: the request is rejected.
            InvalidRequest: the timeout header is not a valid timeout.
        """
        self.context.reject_when_draining()
        self.context.admission.reject_by_headers(read_queue_policy(Request(scope), None, self.context.settings))

    def _send(self, commands: Sequence[Command]) -> None:
        """Send commands to the last worker that sent `WorkerReady`, or to the first worker before that.

        Nothing is sent to a dead worker: the next worker gets all unfinished requests again.
        """
        if self.context.lifecycle.epoch.value <= self._epoch:
            self._channel.submit(encode_commands(CommandBatch(self._epoch, list(commands))))

    def _set_worker(self, worker: WorkerReady) -> None:
        """Send later commands to this worker."""
        if worker.epoch != self._epoch:
            self._epoch = worker.epoch
            self._channel.discard_unsent()
        self.context.worker = worker
        self._metrics.observe_worker_start(worker)
