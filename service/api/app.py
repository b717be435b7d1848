"""LitServe spec of the API process: routes, periodic work, and messages to and from the worker process."""

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
from service.api.adapters import Adapters
from service.api.attention import Inspection
from service.api.completions import Completions
from service.api.context import ApiContext, call
from service.api.embeddings import Embeddings
from service.api.messages import Messages
from service.api.openapi import ROUTES
from service.api.responses_api import ResponsesApi
from service.api.scores import Scores
from service.config.settings import ServeSettings
from service.http.request_io import json_response
from service.ipc.messages import decode_events
from service.ipc.shared_state import Lifecycle
from service.metrics.processes import read_processes
from service.metrics.recorder import EngineState, Metrics
from service.preprocess.request_processor import MAX_INLINE_CHARACTERS
from service.preprocess.served_model import ServedModel
from service.protocol import responses
from service.protocol.chat import TokenizeRequest
from service.protocol.completions import DetokenizeRequest
from service.protocol.errors import ApiError, Draining, Overloaded
from service.protocol.logprobs import format_token_name
from service.requests.adapters import AdapterRegistry
from service.requests.dispatcher import Dispatcher
from service.requests.engine_client import EngineClient
from service.requests.engine_worker import EngineWorker

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
# Interval of the periodic work. A queue timeout takes effect at most this much too late.
_TICK_SECONDS = 1.0
_PLAYGROUND = Path(__file__).parent / "playground" / "index.html"


class Frontend(LitSpec):  # type: ignore[misc]  # litserve has no types
    """LitServe spec that holds the route handlers and the state of the API process, and talks to the workers."""

    stream = True  # LitServe passes every message on at once

    def __init__(
        self,
        settings: ServeSettings,
        *,
        served: ServedModel,
        workers: Sequence[EngineWorker],
        lifecycle: Lifecycle,
        metrics: Metrics,
    ) -> None:
        super().__init__()
        self.api_path = "/v1/completions"  # LitServe requires a route; Kvasir registers all routes itself
        self._metrics = metrics
        admission = Admission(
            max_num_running=settings.max_num_running,
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
            num_workers=len(workers),
            observe_error=partial(metrics.observe, "retry_after_error_seconds"),
        )
        engine_client = EngineClient(
            workers=workers,
            dispatcher=Dispatcher(workers, settings.block_size if settings.enable_prefix_cache else None),
            admission=admission,
            on_worker_ready=metrics.observe_worker_start,
            on_engine=metrics.observe_engine,
            on_replay=partial(metrics.count, "requests_replayed"),
            on_late=partial(metrics.count_wasted_tokens, "cancelled"),
            on_count=partial(setattr, lifecycle.num_active, "value"),  # a drain waits for 0
            adapters=AdapterRegistry(served.adapters),
        )
        self.context = context = ApiContext(settings, served, admission, engine_client, lifecycle, metrics, workers)
        self.completions = Completions(context)
        self.responses = ResponsesApi(context, self.completions)
        self.messages = Messages(context, self.completions)
        self.embeddings = Embeddings(context)
        self.scores = Scores(context)
        self.inspection = Inspection(context)
        self.adapters = Adapters(context)

    def pre_setup(self, lit_api: Any) -> None:
        """Add the routes of `ROUTES` to this spec, except those without a handler, which FastAPI serves."""
        for route in ROUTES:
            if route.handler:
                # Metric collectors and probes send HEAD to test a route.
                methods = ["GET", "HEAD"] if route.method == "GET" else [route.method]
                handler = attrgetter(route.handler)(self)
                handler = self.context.resumable(handler) if route.is_resumable else handler
                self.add_endpoint(route.path, handler, methods)

    # Routes that need no engine.

    async def models(self) -> Response:
        names = [self.context.served.model_name, *self.context.settings.model_alias]
        names += [adapter.name for adapter in self.context.adapters]
        return json_response(responses.ModelList(data=[self._model_card(name) for name in names]))

    async def model(self, model_id: str) -> Response:
        self.context.processor.check_model(model_id)
        return json_response(self._model_card(model_id))

    def _model_card(self, name: str) -> responses.ModelCard:
        served, adapter = self.context.served, self.context.adapters.find(name)
        return responses.ModelCard(
            id=name,
            created=served.manifest.created_seconds if adapter is None else adapter.created_seconds,
            owned_by="kvasir",
            parent=None if adapter is None else served.model_name,
            max_model_len=served.max_context_length,
        )

    async def tokenize(self, request: Request) -> Response:
        """Handle `POST /tokenize`. Return the token ids of a text or conversation, and on request their texts."""
        asked = TokenizeRequest.parse(await self.context.read_body(request))
        processor, tokenizer = self.context.processor, self.context.served.tokenizer
        processor.check_model(asked.model)
        match asked.subject():
            case str() as text:
                parser = processor.parsing_special(asked.parse_special)
                encode = partial(parser.encode, text, begin=asked.add_special_tokens is not False)
                token_ids = await call(encode, in_thread=len(text) > MAX_INLINE_CHARACTERS)
            case messages:
                token_ids = await self.context.chat.encode(asked, messages)
        names = [format_token_name(tokenizer, i) for i in token_ids] if asked.return_token_strs else None
        return json_response(
            responses.Tokenized(
                count=len(token_ids), max_model_len=processor.max_context_length, tokens=token_ids, token_strs=names
            )
        )

    async def detokenize(self, request: Request) -> Response:
        asked = DetokenizeRequest.parse(await self.context.read_body(request))
        self.context.processor.check_model(asked.model)
        self.context.processor.check_ids(asked.tokens, "tokens")
        decode = partial(self.context.served.tokenizer.decode, asked.tokens)
        text = await call(decode, in_thread=len(asked.tokens) > MAX_INLINE_CHARACTERS)
        return json_response(responses.Detokenized(prompt=text))

    async def tokenizer_info(self) -> Response:
        texts, template = self.context.served.special_tokens, self.context.served.template
        return json_response(
            responses.TokenizerInfo(
                eos_token=texts.get("eos_token"),
                bos_token=texts.get("bos_token"),
                pad_token=texts.get("pad_token"),
                chat_template=None if template is None else template.source,
            )
        )

    async def health(self) -> Response:
        return json_response(responses.Health())

    async def ready(self) -> Response:
        """Handle `GET /ready`: status 200 in the state `ready`, even if overloaded; else 503 with Retry-After."""
        readiness = self.context.readiness()
        if readiness.state == "ready":
            return json_response(readiness)
        retry_after = str(max(1, math.ceil(readiness.eta_s or 1.0)))
        return json_response(readiness, 503, {"retry-after": retry_after})

    async def version(self) -> Response:
        return json_response(responses.Version(version=importlib.metadata.version("kvasir")))

    async def server_info(self) -> Response:
        name = self.context.served.model_name
        return json_response(responses.ServerInfo(served_model_name=name, version=importlib.metadata.version("kvasir")))

    async def metrics(self, request: Request) -> Response:
        """Handle `GET /metrics`: update the gauges, and return all metrics. Rendered in a thread."""
        lifecycle, workers = self.context.lifecycle, self.context.workers
        state: str = self.context.readiness().state
        if state == "loading":
            is_first = all(worker.last_ready is None for worker in workers)
            state = EngineState.STARTING if is_first else EngineState.RESTARTING
        self._metrics.set_engine_state(EngineState(state))
        for worker in workers:
            if not worker.state.is_ready:
                self._metrics.forget_engine(worker.index)
            self._metrics.set_gauge("worker_ready", worker.takes_requests, str(worker.index))
        self._metrics.set_worker_restarts(
            signal=sum(worker.state.num_killed.value for worker in workers),
            exit=sum(worker.state.num_exited.value for worker in workers),
        )
        self._metrics.set_gauge("api_requests", lifecycle.num_active.value)
        self._metrics.set_gauge("api_tasks", len(asyncio.all_tasks()))
        if num_loaded := len(list(self.context.adapters)):
            running, waiting = (self.context.engine_client.adapter_names(has_started=each) for each in (True, False))
            scraped_at = time.time()
            self._metrics.observe_adapters(running=running, waiting=waiting, num_loaded=num_loaded, now=scraped_at)
        self._metrics.observe_processes(await asyncio.to_thread(list, read_processes(lifecycle.main_pid)))
        body, content_type = await asyncio.to_thread(self._metrics.render, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def playground(self) -> Response:
        return HTMLResponse(_PLAYGROUND.read_bytes())

    # Periodic work and shutdown.

    async def run_periodic_work(self) -> None:
        """Run the once-a-second work of the API process, until the process ends.

        Record its heartbeat, send keep-alives to silent streams, fail requests whose queue timeout has passed, and
        discard buffered and stored responses that have expired. Exit if the main process has ended.
        """
        context = self.context
        gc.freeze()  # scanning the startup objects for garbage would stall every stream
        while True:
            context.lifecycle.num_api_beats.value += 1
            await asyncio.sleep(_TICK_SECONDS)
            context.lifecycle.end_if_orphaned()
            context.response_store.discard_expired()
            self.responses.store.discard_expired()
            context.engine_client.wake_silent_requests(since_seconds=time.monotonic() - KEEP_ALIVE_SECONDS)
            context.readiness()  # checks the workers' heartbeats
            context.engine_client.expire(time.monotonic())

    def close(self) -> None:
        """End the threads and processes for chat templates and grammars. Cancel buffered and background responses."""
        self.context.chat.close()
        self.context.grammar_checker.close()
        self.context.response_store.close()
        self.responses.store.close()

    def end_all(self) -> None:
        """Fail all unfinished requests with `Draining`. Called when the drain time of a shutdown is over."""
        self.context.engine_client.fail_all(Draining("the server is shutting down", retry_after_seconds=1.0))

    def receive(self, message: bytes, worker: int = 0) -> None:
        """Process one message from the process of a worker. If that raises an exception, fail all unfinished requests.

        worker: index of the worker.
        """
        try:
            self.context.engine_client.receive(decode_events(message), worker)
        except Exception:
            logger.exception("a message from the worker process could not be processed; all unfinished requests fail")
            self.context.engine_client.fail_all(ApiError("internal error"))

    def count_error(self, error: ApiError) -> None:
        """Count an error response: `Overloaded` and `Draining` as admission rejections, others as failed requests."""
        if isinstance(error, Overloaded | Draining):
            self._metrics.count("admission_rejections", error.code)
        else:
            self._metrics.count("request_failures", str(error.status), error.type)

    def reject_from_headers(self, scope: Scope) -> None:
        """Raise an `ApiError` if the server is draining or overloaded, or if the timeout header is invalid.

        Called before the request body is read. `Overloaded` is raised only if even a request for one token would be
        rejected. A longer `timeout` in the unread body is not taken into account.
        """
        self.context.reject_when_draining()
        self.context.admission.reject_by_headers(read_queue_policy(Request(scope), None, self.context.settings))
