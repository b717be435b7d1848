"""API process: routes, admission, delivery, cancellation, replay. Imports no torch.

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
from pathlib import Path
from typing import Any

import msgspec
from fastapi.responses import HTMLResponse, Response
from litserve.specs.base import LitSpec
from starlette.requests import Request
from starlette.types import Scope

from service.admission.controller import Admission
from service.admission.queue_policy import queue_limits
from service.api.attention import Inspection
from service.api.completions import Completions
from service.api.embeddings import Embeddings
from service.api.readiness import get_readiness
from service.api.request_intake import Intake
from service.api.tokenization import TokenizerRoutes
from service.config.settings import ServeSettings
from service.http.request_io import json_response
from service.ipc.channel import Channel
from service.ipc.messages import API_PATH, Command, CommandBatch, WorkerReady, decode_events, encode_commands
from service.ipc.serving_path import get_serving_path
from service.ipc.shared_state import Lifecycle, Watchdog
from service.metrics.recorder import EngineState, Metrics
from service.preprocess.chat_renderer import ChatPrompts
from service.preprocess.request_processor import RequestProcessor
from service.preprocess.served_model import ServedModel
from service.protocol import responses
from service.protocol.errors import ApiError, Draining, Overloaded
from service.requests.engine_client import EngineClient
from service.requests.inflight import InflightRequest
from service.requests.response_store import ResponseStore

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
        self._settings, self._channel, self._lifecycle, self._metrics = settings, channel, lifecycle, metrics
        self._worker_watchdog = Watchdog(lambda: lifecycle.worker_signs)
        self.model_name = served.model_name
        self._card = _model_card(served)
        self._admission = admission = _admission(settings, metrics)
        self._queue_limits = queue_limits(settings)
        self._processor = _request_processor(settings, served, max_num_choices=admission.max_num_sequences)
        self._chat = ChatPrompts(served.template, served.tokenizer, max_waiting=admission.max_num_sequences)
        max_body_bytes = settings.max_body_size
        self._tokenizer_routes = TokenizerRoutes(
            served, processor=self._processor, chat=self._chat, max_body_bytes=max_body_bytes
        )
        self._engine_client = EngineClient(
            send=self._send,
            admission=admission,
            on_worker_ready=self._hear_hello,
            on_engine=metrics.observe_engine,
            on_replay=metrics.count_replay,
            on_late=partial(metrics.count_wasted_tokens, "cancelled"),
        )
        self._inspection = Inspection(
            processor=self._processor,
            config=served.manifest.config,
            max_tokens=settings.max_inspect_tokens,
            max_body_bytes=max_body_bytes,
            reject_when_draining=self._refuse_when_draining,
            engine_client=self._engine_client,
            limits=self._queue_limits,
            on_change=self._count_active,
        )
        self._response_store = ResponseStore(
            keep_seconds=settings.resume_seconds,
            count=metrics.count_resumption,
            waste=partial(metrics.count_wasted_tokens, "unclaimed"),
        )
        intake = Intake(
            reject_when_draining=self._refuse_when_draining,
            admit=self._admit,
            close=self._close,
            response_store=self._response_store,
            metrics=metrics,
        )
        self._completions = Completions(settings, served, intake=intake, processor=self._processor, chat=self._chat)
        width = served.manifest.config.hidden_size
        self._embeddings = Embeddings(settings, intake=intake, processor=self._processor, width=width)
        self._hello: WorkerReady | None = None
        self._epoch = 0  # of the worker that gets the commands

    @property
    def stream(self) -> bool:
        """Always True, so that LitServe passes every message on at once."""
        return True

    def pre_setup(self, lit_api: Any) -> None:
        """Register the routes."""
        for path, endpoint, methods in (
            ("/v1/completions", self._completions.completions, ["POST"]),
            ("/v1/chat/completions", self._completions.chat_completions, ["POST"]),
            ("/v1/embeddings", self._embeddings.embeddings, ["POST"]),
            ("/v1/models", self.models, ["GET"]),
            ("/v1/models/{model_id:path}", self.model, ["GET"]),
            ("/tokenize", self._tokenizer_routes.tokenize, ["POST"]),
            ("/detokenize", self._tokenizer_routes.detokenize, ["POST"]),
            ("/tokenizer_info", self._tokenizer_routes.info, ["GET"]),
            ("/inspect/attention", self._inspection.limits, ["GET"]),
            ("/inspect/attention", self._inspection.attention, ["POST"]),
            ("/health", self.health, ["GET"]),
            ("/ready", self.ready, ["GET"]),
            ("/version", self.version, ["GET"]),
            ("/metrics", self.metrics, ["GET"]),
            ("/playground", self.playground, ["GET"]),
            ("/", self.playground, ["GET"]),
        ):
            # Metric collectors and probes send HEAD to test a route.
            self.add_endpoint(path, endpoint, [*methods, "HEAD"] if "GET" in methods else methods)

    def decode_request(self, request: Any, context_kwargs: Any) -> Any:
        """Not used: the worker's loop reads commands."""
        raise AssertionError("only LitServe's built-in loops call this")

    def encode_response(self, output: Any, context_kwargs: Any) -> Any:
        """Not used: the worker's loop writes events."""
        raise AssertionError("only LitServe's built-in loops call this")

    # Routes.

    async def models(self) -> Response:
        """`GET /v1/models`."""
        return json_response(responses.ModelList(data=[self._card, *map(self._card_of, self._settings.model_alias)]))

    async def model(self, model_id: str) -> Response:
        """`GET /v1/models/{id}`."""
        self._processor.check_model(model_id)
        return json_response(self._card_of(model_id))

    def _card_of(self, model_id: str) -> responses.ModelCard:
        return msgspec.structs.replace(self._card, id=model_id)

    async def health(self) -> Response:
        """`GET /health`: 200 while this process responds."""
        return json_response(responses.Health())

    async def ready(self) -> Response:
        """`GET /ready`: 200 if a request would be served now, else 503 with Retry-After."""
        readiness = self.readiness()
        if readiness.state == "ready":
            return json_response(readiness)
        retry_after = str(max(1, math.ceil(readiness.eta_s or 1.0)))
        return json_response(readiness, 503, {"retry-after": retry_after})

    async def version(self) -> Response:
        """`GET /version`."""
        return json_response(responses.Version(version=importlib.metadata.version("kvasir")))

    async def metrics(self) -> Response:
        """`GET /metrics`. Renders in a thread, because this takes milliseconds."""
        lifecycle = self._lifecycle
        if lifecycle.ready_epoch.value != lifecycle.epoch.value:
            self._metrics.forget_engine()
        self._metrics.set_engine_state(self._engine_state())
        self._metrics.set_worker_restarts(signal=lifecycle.num_killed.value, exit=lifecycle.num_exited.value)
        self._metrics.observe_api(num_requests=lifecycle.num_active.value, num_tasks=len(asyncio.all_tasks()))
        self._metrics.flush()
        body, content_type = await asyncio.to_thread(self._metrics.render)
        return Response(body, headers={"content-type": content_type})

    async def playground(self) -> Response:
        """`GET /playground` and `GET /`: the page to try the model."""
        return HTMLResponse(_PLAYGROUND.read_bytes())

    # Periodic work and shutdown.

    async def tend(self) -> None:
        """Do the periodic work: heartbeat, keep-alives, queue timeouts, metrics; exit if main is gone."""
        gc.freeze()  # startup objects live forever; scanning them for garbage would stall every stream
        while True:
            self._lifecycle.record_api_heartbeat()
            await asyncio.sleep(_TICK_SECONDS)
            self._lifecycle.end_if_orphaned()
            self._response_store.tend()
            self._engine_client.wake_silent_requests(since_seconds=time.monotonic() - KEEP_ALIVE_SECONDS)
            self._engine_client.expire(time.monotonic(), is_stalled=self.readiness().state == "stalled")

    def close(self) -> None:
        """Close the helpers that this process started."""
        self._chat.close()
        self._completions.close()
        self._response_store.close()

    def end_all(self) -> None:
        """Fail all unfinished requests, because the drain time is over."""
        self._engine_client.fail_all(Draining("the server is shutting down", retry_after_seconds=1.0))

    def receive(self, message: bytes) -> None:
        """Process one message of a worker. Never raises; an error fails all requests."""
        try:
            self._engine_client.receive(decode_events(message))
        except Exception:
            logger.exception("a message of the worker could not be processed; all requests fail")
            self._engine_client.fail_all(ApiError("internal error"))

    def readiness(self) -> responses.Readiness:
        """Return the service's state for new requests, and the expected time until ready."""
        return get_readiness(
            self._lifecycle,
            self._hello,
            silent_seconds=self._worker_watchdog.silence(),
            drain_seconds=self._settings.drain_seconds,
        )

    def _engine_state(self) -> EngineState:
        state = self.readiness().state
        if state == "loading":
            return EngineState.STARTING if self._hello is None else EngineState.RESTARTING
        return EngineState(state)

    def count_error(self, error: ApiError) -> None:
        """Count a request that was rejected or failed."""
        if isinstance(error, Overloaded | Draining):
            self._metrics.count_rejection(error.code)
        else:
            self._metrics.count_failure(error.status, error.type)

    def reject_from_headers(self, scope: Scope) -> None:
        """Reject a request from its headers if it would be rejected whatever its body contains (except a `timeout`).

        Raises:
            Draining, Overloaded: the request is rejected.
            InvalidRequest: the timeout header is not a valid timeout.
        """
        self._refuse_when_draining()
        self._admission.reject_by_headers(self._queue_limits.terms(Request(scope), None))

    def _refuse_when_draining(self) -> None:
        readiness = self.readiness()
        if readiness.state == "draining":
            raise Draining("the server is shutting down", retry_after_seconds=readiness.eta_s or 1.0)

    def _admit(self, live: InflightRequest) -> None:
        self._engine_client.open(live)
        self._count_active()

    def _close(self, live: InflightRequest) -> None:
        self._engine_client.close(live)
        self._count_active()

    def _count_active(self) -> None:
        self._lifecycle.num_active.value = self._engine_client.num_requests

    def _send(self, commands: Sequence[Command]) -> None:
        """Send commands to the last worker that sent `WorkerReady`, or to the first worker before that.

        Nothing is sent to a dead worker: the next worker gets all unfinished requests again.
        """
        if self._lifecycle.epoch.value > self._epoch:
            return
        self._channel.submit(encode_commands(CommandBatch(self._epoch, list(commands))))

    def _hear_hello(self, hello: WorkerReady) -> None:
        if hello.epoch != self._epoch:
            self._epoch = hello.epoch
            self._channel.discard_unsent()
        self._hello = hello
        self._metrics.observe_worker_start(hello, get_serving_path(hello))


def _request_processor(settings: ServeSettings, served: ServedModel, *, max_num_choices: int) -> RequestProcessor:
    return RequestProcessor(
        tokenizer=served.tokenizer,
        model_name=served.model_name,
        max_context_length=served.max_context_length,
        max_num_choices=max_num_choices,
        defaults=served.defaults,
        aliases=settings.model_alias,
        max_prompts=settings.max_prompts,
    )


def _admission(settings: ServeSettings, metrics: Metrics) -> Admission:
    return Admission(
        max_num_running=settings.max_num_running,
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        observe_error=metrics.observe_retry_after_error,
    )


def _model_card(served: ServedModel) -> responses.ModelCard:
    return responses.ModelCard(
        id=served.model_name,
        created=served.manifest.created_seconds,
        owned_by="kvasir",
        max_model_len=served.max_context_length,
    )
