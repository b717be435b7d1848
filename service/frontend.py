"""The API process: routes, tokenization, admission, delivery, cancellation, replay. Imports no torch.

LitServe gives this spec its request queue and runs one copy of it in each API process; one LitAPI, one queue and
one worker serve all routes. What comes back arrives on a reserved uid, one message an engine step.
"""

import asyncio
import importlib.metadata
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from litserve.specs.base import LitSpec

from model.manifest import Manifest
from model.tokenizer.interface import Tokenizer
from service import responses
from service.admission import Admission
from service.delivery import Answer, CompletionBody, CompletionStream
from service.journal import Journal, LiveRequest
from service.lifecycle import Lifecycle, Phase
from service.logprobs import token_name
from service.messages import API_PATH, BUS, Command, Hello, decode_events, encode_command
from service.metrics import EngineState, Metrics, render
from service.plan import Planner
from service.requests import json_response, read_body
from service.schemas import (
    ApiError,
    CompletionRequest,
    DetokenizeRequest,
    Draining,
    Overloaded,
    TokenizeRequest,
    parse_body,
)
from service.settings import ServeSettings

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 15.0
# An engine that has work and says nothing for so long makes no progress.
STALL_SECONDS = 60.0
# Longer texts are tokenized in a thread: tiktoken works at about 10 MB/s and releases the interpreter's lock.
_LONG_TEXT = 50_000
_PLAYGROUND = Path(__file__).parent / "playground" / "index.html"


class Frontend(LitSpec):  # type: ignore[misc]  # litserve has no types
    """The routes, and the state of one API process."""

    def __init__(
        self,
        settings: ServeSettings,
        *,
        manifest: Manifest,
        tokenizer: Tokenizer,
        lifecycle: Lifecycle,
        metrics: Metrics,
    ) -> None:
        super().__init__()
        self.api_path = API_PATH
        self._settings = settings
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._tokenizer = tokenizer
        self.model_name = settings.model_name or manifest.name
        self._card = responses.ModelCard(
            id=self.model_name,
            created=manifest.created_seconds,
            owned_by="kvasir",
            max_model_len=manifest.config.max_context_length,
        )
        admission = Admission(
            max_num_running=settings.max_num_running,
            max_waiting_requests=settings.max_waiting_requests,
            max_waiting_tokens=settings.max_waiting_tokens,
        )
        self._planner = Planner(
            tokenizer=tokenizer,
            model_name=self.model_name,
            max_context_length=manifest.config.max_context_length,
            max_num_choices=admission.max_num_sequences,
            longest_token=max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)),
        )
        self._journal = Journal(
            send=self._send, admission=admission, on_hello=self._hear_hello, on_replay=metrics.count_replay
        )
        self._hello: Hello | None = None

    @property
    def stream(self) -> bool:
        """LitServe then hands every message on as it comes."""
        return True

    def pre_setup(self, lit_api: Any) -> None:
        """Name the routes."""
        for path, endpoint, methods in (
            ("/v1/completions", self.completions, ["POST"]),
            ("/v1/models", self.models, ["GET"]),
            ("/v1/models/{model_id:path}", self.model, ["GET"]),
            ("/tokenize", self.tokenize, ["POST"]),
            ("/detokenize", self.detokenize, ["POST"]),
            ("/health", self.health, ["GET", "HEAD"]),
            ("/ready", self.ready, ["GET", "HEAD"]),
            ("/version", self.version, ["GET"]),
            ("/metrics", self.metrics, ["GET"]),
            ("/playground", self.playground, ["GET", "HEAD"]),
            ("/", self.playground, ["GET", "HEAD"]),
        ):
            self.add_endpoint(path, endpoint, methods)

    def decode_request(self, request: Any, context_kwargs: Any) -> Any:
        """Not used: the worker's loop reads commands."""
        raise AssertionError("only LitServe's own loops call this")

    def encode_response(self, output: Any, context_kwargs: Any) -> Any:
        """Not used: the worker's loop writes events."""
        raise AssertionError("only LitServe's own loops call this")

    # Routes.

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        arrival_seconds = time.monotonic()
        body = await self._body(request)
        self._refuse_when_draining()
        asked = CompletionRequest.parse(body)
        if len(body) > _LONG_TEXT:
            choices = await asyncio.to_thread(self._planner.plan, asked, arrival_seconds=arrival_seconds)
        else:
            choices = self._planner.plan(asked, arrival_seconds=arrival_seconds)
        live = LiveRequest(choices=choices, arrival_seconds=arrival_seconds)
        answer = Answer(
            id=f"cmpl-{choices[0].submit.uid}",
            created=int(time.time()),
            model=self.model_name,
            echo=bool(asked.echo),
            logprobs=asked.logprobs is not None,
            include_usage=asked.include_usage,
        )
        self._journal.open(live)
        self._lifecycle.num_active.value = self._journal.num_requests
        delivery = CompletionStream if asked.stream else CompletionBody
        return delivery(live, answer, tokenizer=self._tokenizer, metrics=self._metrics, close=self._close)

    async def models(self) -> Response:
        """`GET /v1/models`."""
        return json_response(responses.ModelList(data=[self._card]))

    async def model(self, model_id: str) -> Response:
        """`GET /v1/models/{id}`."""
        self._planner.check_model(model_id)
        return json_response(self._card)

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        asked = parse_body(TokenizeRequest, await self._body(request))
        self._planner.check_model(asked.model)
        encode = self._tokenizer.encode if asked.add_special_tokens is False else self._planner.encode
        if len(asked.prompt) > _LONG_TEXT:
            token_ids = await asyncio.to_thread(encode, asked.prompt)
        else:
            token_ids = encode(asked.prompt)
        answer = responses.Tokenized(count=len(token_ids), max_model_len=self._card.max_model_len, tokens=token_ids)
        if asked.return_token_strs:
            answer.token_strs = [token_name(self._tokenizer, token_id) for token_id in token_ids]
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        asked = parse_body(DetokenizeRequest, await self._body(request))
        self._planner.check_model(asked.model)
        self._planner.check_ids(asked.tokens, "tokens")
        return json_response(responses.Detokenized(prompt=self._tokenizer.decode(asked.tokens)))

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
        body, content_type = await asyncio.to_thread(render)
        return Response(body, headers={"content-type": content_type})

    async def playground(self) -> Response:
        """`GET /playground`: the page people open first."""
        return HTMLResponse(_PLAYGROUND.read_bytes())

    # The process around the routes.

    async def tend(self) -> None:
        """Run beside the routes: signs of life for silent streams, and an end if main is gone."""
        while True:
            await asyncio.sleep(1.0)
            self._lifecycle.end_if_orphaned()
            self._journal.poke_silent(since_seconds=time.monotonic() - KEEP_ALIVE_SECONDS)

    def end_all(self) -> None:
        """The time to finish is over: tell every client that is still here."""
        self._journal.fail_all(Draining("the server is shutting down", retry_after_seconds=1.0))

    def receive(self, message: bytes) -> None:
        """One message of a worker. Raises nothing: LitServe's reader task would end for good."""
        try:
            self._journal.receive(decode_events(message))
        except Exception:
            logger.exception("a worker's message could not be read")
            self._journal.fail_all(ApiError("internal error"))

    def readiness(self) -> responses.Readiness:
        """Whether a request would be served now, and if not, why and how long."""
        lifecycle, now = self._lifecycle, time.monotonic()
        if lifecycle.phase.value >= Phase.DRAINING:
            elapsed = now - lifecycle.phase_seconds.value
            return responses.Readiness(
                state="draining",
                phase="finishing running requests",
                elapsed_s=round(elapsed, 3),
                eta_s=round(max(0.0, self._settings.drain_seconds - elapsed), 3),
            )
        if self._hello is None or self._hello.epoch < lifecycle.epoch.value:
            elapsed = now - lifecycle.epoch_seconds.value
            usual = None if self._hello is None else round(max(0.0, self._hello.startup_seconds - elapsed), 3)
            return responses.Readiness(
                state="loading", phase="starting a worker", elapsed_s=round(elapsed, 3), eta_s=usual
            )
        silence = now - self._journal.last_event_seconds
        if self._journal.num_choices and silence > STALL_SECONDS:
            return responses.Readiness(state="stalled", phase="no progress", elapsed_s=round(silence, 3), eta_s=None)
        return responses.Readiness(
            state="ready",
            phase="serving",
            elapsed_s=round(now - lifecycle.epoch_seconds.value, 3),
            eta_s=0.0,
        )

    def count_error(self, error: ApiError) -> None:
        """Count a request that was refused or failed."""
        if isinstance(error, Overloaded | Draining):
            self._metrics.count_rejection(error.code)
        else:
            self._metrics.count_failure(error.status, error.type)

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, max_bytes=self._settings.max_body_mb * 2**20)

    def _refuse_when_draining(self) -> None:
        readiness = self.readiness()
        if readiness.state == "draining":
            raise Draining("the server is shutting down", retry_after_seconds=readiness.eta_s or 1.0)

    def _close(self, live: LiveRequest) -> None:
        self._journal.close(live)
        self._lifecycle.num_active.value = self._journal.num_requests

    def _send(self, commands: Sequence[Command]) -> None:
        """Put commands on LitServe's queue: one trip through its manager, however many they are."""
        payload = tuple(map(encode_command, commands))
        self.request_queue.put((self.response_queue_id, BUS, time.monotonic(), payload))

    def _hear_hello(self, hello: Hello) -> None:
        self._hello = hello
        if self._lifecycle.phase.value < Phase.DRAINING:
            self._metrics.set_engine_state(EngineState.READY)


class Sink:
    """What LitServe's reader takes for a streaming request's buffer: it appends messages and sets the event."""

    def __init__(self, frontend: Frontend) -> None:
        self.worker_id = None
        self.response_queue = self
        self.event = self
        self._frontend = frontend

    def append(self, response: Sequence[Any]) -> None:
        self._frontend.receive(response[0])

    def set(self) -> None:
        """The message was distributed by `append`."""
