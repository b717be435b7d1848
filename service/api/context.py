"""State of the API process that the route handlers share: the processor, the engine client, readiness, admission."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from service.admission.controller import Admission
from service.config.settings import ServeSettings
from service.http.request_io import read_body
from service.ipc.messages import WorkerReady
from service.ipc.shared_state import Lifecycle, Phase, Watchdog
from service.metrics.recorder import Metrics
from service.preprocess.chat_renderer import ChatPrompts
from service.preprocess.request_processor import RequestProcessor
from service.preprocess.served_model import ServedModel
from service.protocol.errors import Draining
from service.protocol.responses import Readiness
from service.requests.engine_client import EngineClient
from service.requests.response_store import ResponseStore

# A worker without a heartbeat for this long is stalled. Heartbeats come after each step, and each second while idle.
# The alert fires within 60 s of a hang: this time, plus a scrape (5 s), plus an evaluation of the rules (15 s).
STALL_SECONDS = 20.0

# Function from a request, the request body and the arrival time in seconds to the response.
Respond: TypeAlias = Callable[[Request, bytes, float], Awaitable[Response]]


class ApiContext:
    """Shared state of the route handlers.

    worker: start-up message of the latest worker; None before the first worker is up.
    """

    def __init__(
        self,
        settings: ServeSettings,
        served: ServedModel,
        *,
        admission: Admission,
        engine_client: EngineClient,
        lifecycle: Lifecycle,
        metrics: Metrics,
    ) -> None:
        self.settings = settings
        self.served = served
        self.admission = admission
        self.engine_client = engine_client
        self.lifecycle = lifecycle
        self.metrics = metrics
        self.worker: WorkerReady | None = None
        self.worker_watchdog = Watchdog(lambda: lifecycle.worker_signs)
        self.processor = RequestProcessor(
            tokenizer=served.tokenizer,
            model_name=served.model_name,
            max_context_length=served.max_context_length,
            max_num_choices=admission.max_num_sequences,
            defaults=served.defaults,
            aliases=settings.model_alias,
            max_prompts=settings.max_prompts,
        )
        self.chat = ChatPrompts(served.template, served.tokenizer, max_waiting=admission.max_num_sequences)
        self.response_store = ResponseStore(
            keep_seconds=settings.resume_seconds,
            count=metrics.count_resumption,
            waste=partial(metrics.count_wasted_tokens, "unclaimed"),
        )

    async def read_body(self, request: Request) -> bytes:
        """Read a request's body, of at most `--max-body-size` bytes. Raises an `ApiError` for an unusable body."""
        return await read_body(request, max_bytes=self.settings.max_body_size)

    async def respond(self, request: Request, respond: Respond) -> Response:
        """Return the engine's response to a request, or a buffered response to an earlier attempt at the request.

        Raises:
            Draining: the service accepts no new requests.
        """
        arrival_seconds = time.monotonic()
        body = await self.read_body(request)

        async def make() -> Response:
            self.reject_when_draining()
            return await respond(request, body, arrival_seconds)

        return await self.response_store.answer(request, body, make)

    def reject_when_draining(self) -> None:
        """Raise `Draining` if the service accepts no new requests."""
        readiness = self.readiness()
        if readiness.state == "draining":
            raise Draining("the server is shutting down", retry_after_seconds=readiness.eta_s or 1.0)

    def readiness(self) -> Readiness:
        """Return the service's state for new requests, and the expected time until ready."""
        now, lifecycle, worker = time.monotonic(), self.lifecycle, self.worker
        serving = worker if worker is not None and worker.epoch >= lifecycle.epoch.value else None
        report = (
            Readiness
            if serving is None
            else partial(Readiness, level=serving.kernel_level, attention=serving.attention, dtype=serving.dtype)
        )
        if lifecycle.phase.value >= Phase.DRAINING:
            elapsed = now - lifecycle.phase_seconds.value
            return report(
                state="draining",
                phase="finishing running requests",
                elapsed_s=round(elapsed, 3),
                eta_s=round(max(0.0, self.settings.drain_seconds - elapsed), 3),
            )
        elapsed = now - lifecycle.epoch_seconds.value
        if serving is None:
            usual = None if worker is None else round(max(0.0, worker.startup_seconds - elapsed), 3)
            return report(state="loading", phase="starting a worker", elapsed_s=round(elapsed, 3), eta_s=usual)
        silence = self.worker_watchdog.silence()
        if silence > STALL_SECONDS:
            return report(state="stalled", phase="the worker hangs", elapsed_s=round(silence, 3), eta_s=None)
        return report(state="ready", phase="serving", elapsed_s=round(elapsed, 3), eta_s=0.0)
