"""State of the API process that the route handlers share."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from service.admission.controller import Admission
from service.config.settings import ServeSettings
from service.http.request_io import read_body
from service.ipc.shared_state import Lifecycle, Phase
from service.metrics.recorder import Metrics
from service.preprocess.chat_renderer import ChatPrompts
from service.preprocess.request_processor import RequestProcessor
from service.preprocess.served_model import ServedModel
from service.protocol.errors import Draining
from service.protocol.responses import Readiness
from service.requests.engine_client import EngineClient
from service.requests.engine_worker import EngineWorker
from service.requests.response_store import ResponseStore
from service.structured_output.compiler import GrammarChecker

T = TypeVar("T")
# Function from a request, the request body and the arrival time in seconds to the response.
Respond: TypeAlias = Callable[[Request, bytes, float], Awaitable[Response]]


@dataclass(eq=False)
class ApiContext:
    """Shared state of the route handlers."""

    settings: ServeSettings
    served: ServedModel
    admission: Admission
    engine_client: EngineClient
    lifecycle: Lifecycle
    metrics: Metrics
    workers: Sequence[EngineWorker]

    def __post_init__(self) -> None:
        settings, served, admission = self.settings, self.served, self.admission
        self.adapters = self.engine_client.adapters
        self.processor = RequestProcessor(
            tokenizer=served.tokenizer,
            model_name=served.model_name,
            max_context_length=served.max_context_length,
            max_num_choices=admission.max_num_sequences,
            defaults=served.defaults,
            aliases=settings.model_alias,
            adapters=self.adapters,
            max_prompts=settings.max_prompts,
            parse_special=settings.parse_special,
        )
        self.chat = ChatPrompts(
            served.template, served.tokenizer, served.chat_format, max_waiting=admission.max_num_sequences
        )
        self.grammar_checker = GrammarChecker(
            served.tokenizer, max_waiting=admission.max_num_sequences, observe=self.metrics.observe_structured
        )
        self.response_store = ResponseStore(
            keep_seconds=settings.resume_seconds,
            count=partial(self.metrics.count, "requests_resumed"),
            waste=partial(self.metrics.count_wasted_tokens, "unclaimed"),
        )

    async def read_body(self, request: Request) -> bytes:
        """Return a request's body. Raises an `ApiError` for one that is compressed or over `--max-body-size` bytes."""
        return await read_body(request, max_bytes=self.settings.max_body_size)

    def resumable(self, respond: Respond) -> Callable[[Request], Awaitable[Response]]:
        """Return a route handler that returns `respond`'s response, or for a retry the first attempt's, as buffered.

        The handler raises `Draining` instead of calling `respond` while the service is shutting down.
        """

        async def handle(request: Request) -> Response:
            arrival_seconds = time.monotonic()
            body = await self.read_body(request)

            async def make() -> Response:
                self.reject_when_draining()
                return await respond(request, body, arrival_seconds)

            return await self.response_store.answer(request, body, make)

        return handle

    def reject_when_draining(self) -> None:
        """Raise `Draining` if the service is shutting down and accepts no new requests."""
        if self.lifecycle.phase.value >= Phase.DRAINING:
            left = self.settings.drain_seconds - (time.monotonic() - self.lifecycle.phase_seconds.value)
            raise Draining("the server is shutting down", retry_after_seconds=left if left > 0 else 1.0)

    def readiness(self) -> Readiness:
        """Return the response body of `/ready`: the state, and seconds until ready or drained, None if unknown.

        The service is ready while a worker takes requests. Fields about the engine are those of the first such worker.
        """
        now, lifecycle = time.monotonic(), self.lifecycle
        serving = [worker for worker in self.workers if worker.ready is not None]
        silence = min((worker.check_heartbeat() for worker in serving), default=0.0)
        first = next((worker for worker in serving if worker.takes_requests), next(iter(serving), self.workers[0]))
        state: Literal["ready", "loading", "draining", "stalled"] = "ready"
        phase, elapsed = "serving", now - first.state.epoch_seconds.value
        eta: float | None = 0.0
        if lifecycle.phase.value >= Phase.DRAINING:
            elapsed = now - lifecycle.phase_seconds.value
            state, phase, eta = "draining", "finishing running requests", self.settings.drain_seconds - elapsed
        elif not serving:
            state, phase = "loading", "starting a worker"
            eta = None if first.last_ready is None else first.last_ready.startup_seconds - elapsed
        elif first.is_stalled:
            state, phase, elapsed, eta = "stalled", "the worker hangs", silence, None
        ready = first.ready
        return Readiness(
            state=state,
            phase=phase,
            elapsed_s=round(elapsed, 3),
            eta_s=None if eta is None else round(max(0.0, eta), 3),
            level=None if ready is None else ready.kernel_level,
            attention=None if ready is None else ready.attention,
            dtype=None if ready is None else ready.dtype,
            fallbacks=() if ready is None else ready.fallbacks,
            devices=len(self.workers),
            devices_ready=sum(worker.takes_requests for worker in serving),
        )


async def call(function: Callable[[], T], *, in_thread: bool) -> T:
    """Call a function and return its result; with `in_thread`, in a thread, so that the event loop stays free."""
    return await asyncio.to_thread(function) if in_thread else function()
