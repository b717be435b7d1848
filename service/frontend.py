"""The API process: routes, admission, delivery, cancellation, replay. Imports no torch.

LitServe gives this spec its request queue and runs one copy of it in each API process; one LitAPI, one queue and
one worker serve all routes. What comes back arrives by `event_channel`, one message an engine step.
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

from service import responses
from service.admission import Admission
from service.chat import ChatPrompts
from service.completions import Completions
from service.embeddings import Embeddings
from service.errors import ApiError, Draining, Overloaded
from service.inspection import Inspection
from service.intake import Intake
from service.journal import Journal
from service.lifecycle import Lifecycle
from service.live_request import LiveRequest
from service.messages import API_PATH, BUS, Cancel, Command, Hello, decode_events, encode_command
from service.metrics import EngineState, Metrics, render
from service.plan import Planner
from service.queue_terms import queue_limits
from service.readiness import readiness_of
from service.recordings import Recordings
from service.requests import json_response
from service.serving import Serving
from service.settings import ServeSettings
from service.tokenizer_routes import TokenizerRoutes
from service.watchdog import Watchdog

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
# How often the process looks after itself: a wait that is too long ends so much later at most.
_TICK_SECONDS = 1.0
_PLAYGROUND = Path(__file__).parent / "playground" / "index.html"


class Frontend(LitSpec):  # type: ignore[misc]  # litserve has no types
    """The routes, and the state of one API process."""

    def __init__(self, settings: ServeSettings, *, serving: Serving, lifecycle: Lifecycle, metrics: Metrics) -> None:
        super().__init__()
        self.api_path = API_PATH
        self._settings = settings
        self._lifecycle = lifecycle
        self._worker_watchdog = Watchdog(lambda: lifecycle.worker_signs)
        self._metrics = metrics
        self.model_name = serving.model_name
        self._card = _model_card(serving)
        self._admission = admission = _admission(settings, metrics)
        self._queue_limits = queue_limits(settings)
        self._planner = Planner(
            tokenizer=serving.tokenizer,
            model_name=self.model_name,
            max_context_length=serving.max_context_length,
            max_num_choices=admission.max_num_sequences,
            defaults=serving.defaults,
            aliases=settings.model_alias,
            max_prompts=settings.max_prompts,
        )
        self._chat = ChatPrompts(serving.template, serving.tokenizer, max_waiting=admission.max_num_sequences)
        max_body_bytes = settings.max_body_size
        self._tokenizer_routes = TokenizerRoutes(
            serving, planner=self._planner, chat=self._chat, max_body_bytes=max_body_bytes
        )
        self._journal = Journal(
            send=self._send,
            admission=admission,
            on_hello=self._hear_hello,
            on_replay=metrics.count_replay,
            on_late=partial(metrics.count_wasted_tokens, "cancelled"),
        )
        self._inspection = Inspection(
            planner=self._planner,
            config=serving.manifest.config,
            max_tokens=settings.max_inspect_tokens,
            max_body_bytes=max_body_bytes,
            refuse_when_draining=self._refuse_when_draining,
            journal=self._journal,
            limits=self._queue_limits,
            on_change=self._count_active,
        )
        self._recordings = Recordings(
            keep_seconds=settings.resume_seconds,
            count=metrics.count_resumption,
            waste=partial(metrics.count_wasted_tokens, "unclaimed"),
        )
        intake = Intake(
            refuse_when_draining=self._refuse_when_draining,
            admit=self._admit,
            close=self._close,
            recordings=self._recordings,
            metrics=metrics,
        )
        self._completions = Completions(settings, serving, intake=intake, planner=self._planner, chat=self._chat)
        width = serving.manifest.config.hidden_size
        self._embeddings = Embeddings(settings, intake=intake, planner=self._planner, width=width)
        self._hello: Hello | None = None
        self.inboxes: tuple[Any, ...] = ()  # of one worker after the other; set before this process is forked

    @property
    def stream(self) -> bool:
        """LitServe then hands every message on as it comes."""
        return True

    def pre_setup(self, lit_api: Any) -> None:
        """Name the routes."""
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
            # Collectors and probes ask with HEAD whether there is something to get.
            self.add_endpoint(path, endpoint, [*methods, "HEAD"] if "GET" in methods else methods)

    def decode_request(self, request: Any, context_kwargs: Any) -> Any:
        """Not used: the worker's loop reads commands."""
        raise AssertionError("only LitServe's own loops call this")

    def encode_response(self, output: Any, context_kwargs: Any) -> Any:
        """Not used: the worker's loop writes events."""
        raise AssertionError("only LitServe's own loops call this")

    # Routes.

    async def models(self) -> Response:
        """`GET /v1/models`."""
        return json_response(responses.ModelList(data=[self._card, *map(self._card_of, self._settings.model_alias)]))

    async def model(self, model_id: str) -> Response:
        """`GET /v1/models/{id}`."""
        self._planner.check_model(model_id)
        return json_response(self._card_of(model_id))

    def _card_of(self, model_id: str) -> responses.ModelCard:
        return msgspec.structs.replace(self._card, id=model_id)

    async def health(self) -> Response:
        """`GET /health`: this process answers."""
        return json_response(responses.Health())

    async def ready(self) -> Response:
        """`GET /ready`: a request would be served now."""
        readiness = self.readiness()
        if readiness.state == "ready":
            return json_response(readiness)
        retry_after = str(max(1, math.ceil(readiness.eta_s or 1.0)))
        return json_response(readiness, 503, {"retry-after": retry_after})

    async def version(self) -> Response:
        """`GET /version`."""
        return json_response(responses.Version(version=importlib.metadata.version("kvasir")))

    async def metrics(self) -> Response:
        """`GET /metrics`. Reads files of every process that ever ran, hence the thread."""
        num_tasks = len(asyncio.all_tasks())
        self._metrics.set_engine_state(self._engine_state())
        self._metrics.flush()
        self._metrics.observe_api(num_requests=self._lifecycle.num_active.value, num_tasks=num_tasks)
        body, content_type = await asyncio.to_thread(render)
        return Response(body, headers={"content-type": content_type})

    async def playground(self) -> Response:
        """`GET /playground`: the page people open first."""
        return HTMLResponse(_PLAYGROUND.read_bytes())

    # The process around the routes.

    async def tend(self) -> None:
        """Run beside the routes: signs of life for silent streams, ends of waits, and an end if main is gone."""
        gc.freeze()  # what is here stays; to look through it for garbage would hold up every stream
        while True:
            self._lifecycle.beat_api()
            await asyncio.sleep(_TICK_SECONDS)
            self._lifecycle.end_if_orphaned()
            self._recordings.tend()
            self._metrics.flush()
            self._journal.poke_silent(since_seconds=time.monotonic() - KEEP_ALIVE_SECONDS)
            self._journal.expire(time.monotonic(), is_stalled=self.readiness().state == "stalled")

    def close(self) -> None:
        """End what this process started."""
        self._chat.close()
        self._completions.close()
        self._recordings.close()

    def end_all(self) -> None:
        """The time to finish is over: tell every client that is still here."""
        self._journal.fail_all(Draining("the server is shutting down", retry_after_seconds=1.0))

    def receive(self, message: bytes) -> None:
        """One message of a worker. Raises nothing: nobody would be told."""
        try:
            self._journal.receive(decode_events(message))
        except Exception:
            logger.exception("a worker's message could not be read")
            self._journal.fail_all(ApiError("internal error"))

    def readiness(self) -> responses.Readiness:
        """Whether a request would be served now, and if not, why and how long."""
        return readiness_of(
            self._lifecycle,
            self._hello,
            silent_seconds=self._worker_watchdog.silence(),
            drain_seconds=self._settings.drain_seconds,
        )

    def _engine_state(self) -> EngineState:
        """The state that the metric reports. Only this process sets it: two would overwrite each other's."""
        state = self.readiness().state
        if state == "loading":
            return EngineState.STARTING if self._hello is None else EngineState.RESTARTING
        return EngineState(state)

    def count_error(self, error: ApiError) -> None:
        """Count a request that was refused or failed."""
        if isinstance(error, Overloaded | Draining):
            self._metrics.count_rejection(error.code)
        else:
            self._metrics.count_failure(error.status, error.type)

    def refuse_unread(self, scope: Scope) -> None:
        """Refuse a request by its head, where none would be taken whatever its body asks for but a `timeout`.

        Raises:
            Draining, Overloaded: it is refused.
            InvalidRequest: its head says a timeout that is none.
        """
        self._refuse_when_draining()
        self._admission.refuse_hopeless(self._queue_limits.terms(Request(scope), None))

    def _refuse_when_draining(self) -> None:
        readiness = self.readiness()
        if readiness.state == "draining":
            raise Draining("the server is shutting down", retry_after_seconds=readiness.eta_s or 1.0)

    def _admit(self, live: LiveRequest) -> None:
        self._journal.open(live)
        self._count_active()

    def _close(self, live: LiveRequest) -> None:
        self._journal.close(live)
        self._count_active()

    def _count_active(self) -> None:
        self._lifecycle.num_active.value = self._journal.num_requests + self._journal.num_looks

    def _send(self, commands: Sequence[Command]) -> None:
        """Put commands on the worker's queue, or on its dead predecessor's: one trip through LitServe's manager.

        Raises:
            Draining: the queue process is gone, and main is about to end the service.
        """
        payload = tuple(map(encode_command, commands))
        try:
            self.request_queue.put((self.response_queue_id, BUS, time.monotonic(), payload))
        except (EOFError, OSError):
            if not all(isinstance(command, Cancel) for command in commands):  # nothing is computed any more
                raise Draining("the server is shutting down", retry_after_seconds=1.0) from None

    def _hear_hello(self, hello: Hello) -> None:
        self._hello = hello
        self.request_queue = self.inboxes[hello.epoch % len(self.inboxes)]


def _admission(settings: ServeSettings, metrics: Metrics) -> Admission:
    return Admission(
        max_num_running=settings.max_num_running,
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        observe_error=metrics.observe_retry_after_error,
    )


def _model_card(serving: Serving) -> responses.ModelCard:
    return responses.ModelCard(
        id=serving.model_name,
        created=serving.manifest.created_seconds,
        owned_by="kvasir",
        max_model_len=serving.max_context_length,
    )
