"""Record of an HTTP request at its end: the source of its log line and of its trace.

The middleware, the error handlers and the response's `Delivery` leave what they know in the request's state. The record
is computed once, at the end, so that a token costs nothing.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.streaming import DELIVERY, Delivery
from service.config.log_setup import FIELDS
from service.http.middleware import KEY_NAME
from service.http.request_io import ERROR, REQUEST_ID
from service.protocol.errors import ApiError, ClientGone
from service.requests.inflight import Choice

logger = logging.getLogger("kvasir.request")

# Paths that probes and Prometheus request every few seconds. Their requests are logged at level debug, without a trace.
PROBES: Final = frozenset({"/health", "/ready", "/metrics"})
CLIENT_GONE: Final = ClientGone.status  # logged as the status of a request whose client left before any response
_MAX_PATH: Final = 200  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The engine's part of a request: choices, token counts, and times in seconds; None for a phase that has not ended.

    queue_seconds, prefill_seconds: of the choice with the earliest first token.
    decode_seconds: the longest time of a choice from its first token, at `decode_start`, to its last token.
    restarts: times at which the request was submitted again, because its worker had died.
    """

    model: str | None
    response_id: str | None
    is_stream: bool
    choices: Sequence[Choice]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_reasoning_tokens: int | None
    start: float
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    ttft_seconds: float | None = None
    decode_start: float | None = None
    decode_seconds: float | None = None
    restarts: Sequence[float] = ()

    @property
    def finish_reasons(self) -> list[str | None]:
        """Reason for the end of each choice; None for an unfinished choice, such as that of a client that left."""
        return [None if choice.finish is None else choice.finish.reason.value for choice in self.choices]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Outcome of a request: identity, HTTP status, error and duration, and the engine's part, if it had one.

    is_client_gone: the client left before the end of the response.
    is_replay: the response, or its beginning, was buffered for an earlier request, whose record has the tokens.
    start: `time.monotonic()` at the start. `start_ns`: the same as nanoseconds since 1970.
    """

    request_id: str | None = None
    key: str | None = None
    method: str | None = None  # None: rejected before its head was complete
    path: str | None = None
    route: str | None = None  # path with the names of parameters; None if no route was reached
    status: int
    error: str | None = None
    is_client_gone: bool = False
    is_replay: bool = False
    start: float = 0.0
    start_ns: int = 0
    total_seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)  # trace context that the client sent
    generation: Generation | None = None

    @property
    def is_probe(self) -> bool:
        return self.path in PROBES


Observe: TypeAlias = Callable[[RequestRecord], None]


class RequestObserver:
    """ASGI middleware: report the record of each request at its end to each function of `observers`."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observe]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, start_ns = time.monotonic(), time.time_ns()
        state = scope.setdefault("state", {})
        state[DELIVERY] = None
        status, is_replay, is_complete = None, False, False

        async def send_and_observe(message: Message) -> None:
            nonlocal status, is_replay, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                is_replay = any(name == b"idempotent-replayed" for name, _ in message["headers"])
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                is_complete = True

        try:
            await self._app(scope, receive, send_and_observe)
        except Exception:  # the error handler, which is outside of this middleware, sends the response
            status, is_complete = status or ApiError.status, True
            state.setdefault(ERROR, ApiError)
            raise
        finally:
            generation = None if (delivery := state.get(DELIVERY)) is None else _generation(delivery)
            error: type[ApiError] | None = state.get(ERROR)
            failure = None if delivery is None or delivery.failure is None else type(delivery.failure)
            if error is None and not (is_complete and _is_departure(failure)):
                error = failure
            if status in (None, CLIENT_GONE):
                status, is_complete = (CLIENT_GONE, False) if error is None else (error.status, True)
            record = RequestRecord(
                request_id=state.get(REQUEST_ID),
                key=state.get(KEY_NAME),
                method=scope["method"],
                path=scope["path"][:_MAX_PATH],
                route=getattr(scope.get("route"), "path", None),
                status=status,
                error=None if error is None else error.code,
                is_client_gone=not is_complete or _is_departure(error),
                is_replay=is_replay,
                start=start,
                start_ns=start_ns,
                total_seconds=time.monotonic() - start,
                headers=_trace_context(scope),
                generation=generation,
            )
            for observe in self._observers:
                observe(record)


def rejection(error: ApiError) -> RequestRecord:
    """Return the record of a request that was rejected before its head was complete, or that was not valid HTTP."""
    return RequestRecord(status=error.status, error=error.code)


def _is_departure(error: type[ApiError] | None) -> bool:
    return error is not None and issubclass(error, ClientGone)


def _trace_context(scope: Scope) -> dict[str, str]:
    """Return the headers of the client's trace (https://www.w3.org/TR/trace-context/), fields of one name joined."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name in (b"traceparent", b"tracestate"):
            key, text = name.decode(), value.decode("latin-1")
            found[key] = f"{found[key]},{text}" if key in found else text
    return found


def _generation(delivery: Delivery) -> Generation:
    """Return the engine's part of a request, from the choices and token times of its `Delivery`."""
    choices = delivery.choices
    prompts = {choice.prompt_index: choice for choice in reversed(choices)}.values()  # first sample of each prompt
    finishes = [choice.finish for choice in choices if choice.finish is not None]
    earliest = min(finishes, key=lambda finish: finish.queue_seconds + finish.prefill_seconds, default=None)
    slowest = max(finishes, key=lambda finish: finish.decode_seconds, default=None)
    start, sent = choices[0].submit.arrival_seconds, delivery.token_seconds
    decode_start, decode_seconds = None, None
    if slowest is not None:
        decode_start = start + slowest.queue_seconds + slowest.prefill_seconds
        decode_seconds = slowest.decode_seconds
    elif sent is not None:
        decode_start, decode_seconds = sent[0], sent[1] - sent[0]
    return Generation(
        model=delivery.model,
        response_id=delivery.response_id,
        is_stream=delivery.media_type == "text/event-stream",
        choices=choices,
        num_prompt_tokens=sum(choice.num_prompt_tokens for choice in prompts),
        num_cached_tokens=sum(choice.finish.num_cached_tokens for choice in prompts if choice.finish is not None),
        num_completion_tokens=sum(len(choice.token_ids) for choice in choices),
        num_reasoning_tokens=delivery.num_reasoning_tokens,
        start=start,
        queue_seconds=None if earliest is None else earliest.queue_seconds,
        prefill_seconds=None if earliest is None else earliest.prefill_seconds,
        ttft_seconds=None if sent is None else sent[0] - start,
        decode_start=decode_start,
        decode_seconds=decode_seconds,
        restarts=max((choice.retry_seconds for choice in choices), key=len),
    )


@dataclass(frozen=True, slots=True)
class RequestLog:
    """Request log: one line per request. `decode` turns token ids into text; None: no texts are logged.

    model_name: name of the served model, for requests that name no model.
    """

    model_name: str
    decode: Callable[[Sequence[int]], str] | None = None

    def write(self, record: RequestRecord) -> None:
        """Write a request's log line, at level DEBUG if it is a probe. Fields that do not apply are left out."""
        level = logging.DEBUG if record.is_probe else logging.INFO
        if logger.isEnabledFor(level):
            fields = {name: value for name, value in self._fields(record).items() if value is not None}
            subject = "incomplete request" if record.method is None else f"{record.method} {record.path}"
            logger.log(level, "%s: %d", subject, record.status, extra={FIELDS: fields})

    def _fields(self, record: RequestRecord) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "request_id": record.request_id,
            "key": record.key,
            "method": record.method,
            "path": record.path,
            "route": record.route,
            "status": record.status,
            "error": record.error,
            "client_gone": record.is_client_gone,
            "replay": record.is_replay or None,
            "total_seconds": round(record.total_seconds, 6),
        }
        if (done := record.generation) is None:
            return fields
        fields |= {
            "model": done.model or self.model_name,
            "response_id": done.response_id,
            "stream": done.is_stream,
            "num_choices": len(done.choices),
            "finish_reasons": done.finish_reasons,
            "num_prompt_tokens": done.num_prompt_tokens,
            "num_cached_tokens": done.num_cached_tokens,
            "num_completion_tokens": done.num_completion_tokens,
            "num_reasoning_tokens": done.num_reasoning_tokens,
            "num_worker_restarts": len(done.restarts),
        }
        for name in ("queue_seconds", "prefill_seconds", "ttft_seconds", "decode_seconds"):
            seconds = getattr(done, name)
            fields[name] = None if seconds is None else round(seconds, 6)
        if self.decode is not None:
            prompts = {choice.prompt_index: choice.submit.prompt_token_ids for choice in done.choices}
            fields["prompts"] = [self.decode(token_ids) for token_ids in prompts.values()]
            fields["completions"] = [self.decode(choice.token_ids) for choice in done.choices]
        return fields
