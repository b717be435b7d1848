"""ASGI responses made from the engine's token deltas: a stream of server-sent events, or one JSON body."""

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.context import call
from service.api.response_builder import ResponseBuilder
from service.http.connection import ChunkedBody, chunked_body
from service.http.request_io import wait_for_disconnect
from service.ipc.messages import Finish, FinishReason, TokenDelta
from service.metrics.recorder import Metrics
from service.protocol.errors import ApiError, ClientGone
from service.protocol.responses import (
    KEEP_ALIVE,
    CompletionTokensDetails,
    PromptTokensDetails,
    Timings,
    Usage,
    encode,
)
from service.requests.inflight import Choice, Deltas, InflightRequest

# Number of logprob entries that take about as long to encode as a step takes: 20 µs each, with 20 alternatives.
MAX_INLINE_LOGPROBS = 500
DELIVERY: Final = "delivery"  # attribute of `request.state`, if observed: the response that delivers the output


class Delivery(Response, ABC):
    """ASGI response to one inflight request. Calls `finish` with the request when the response ends for any reason.

    num_sent_tokens: completion tokens in the events built so far, which are sent or are sent next.
    model: model name in the request; None if it names none. response_id: id in the body; None if it has none.
    """

    model: str | None = None
    response_id: str | None = None

    def __init__(
        self, request: InflightRequest, *, metrics: Metrics, finish: Callable[[InflightRequest], object]
    ) -> None:
        # Response.__init__ would set Content-Length, but the body is unknown yet.
        self.status_code = 200
        self.background = None
        self.init_headers()
        self._request = request
        self._metrics = metrics
        self._finish = finish
        self.num_sent_tokens = 0
        self._first_token_seconds: dict[int, float] = {}  # by the choice's index
        self._last_token_seconds: dict[int, float] = {}

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens so far; None if the response is not parsed for reasoning."""
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Raises the request's `ApiError` if it failed before anything was sent.

        A later error is reported in the stream. If the client disconnects, only count the cancelled request.
        """
        if DELIVERY in (state := scope.get("state", {})):
            state[DELIVERY] = self
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await self._deliver(send, chunked_body(scope))
        except ClientGone:
            has_started = any(choice.has_started for choice in self._request.choices)
            self._metrics.count("requests_cancelled", "running" if has_started else "waiting")
            self._metrics.count_wasted_tokens("cancelled", self._num_undelivered())
        except ApiError:
            self._record_failure()
            raise
        finally:
            watcher.cancel()
            self._finish(self._request)

    @property
    def choices(self) -> list[Choice]:
        """Choices of the request, finished or not."""
        return self._request.choices

    @property
    def failure(self) -> ApiError | None:
        """Error that ended the request, even if its stream had begun; None without an error."""
        return self._request.failure

    @property
    def token_seconds(self) -> tuple[float, float] | None:
        """Times of the first and the last token sent to the client, of all choices together; None before a token.

        In `time.monotonic()` seconds.
        """
        firsts, lasts = self._first_token_seconds.values(), self._last_token_seconds.values()
        return (min(firsts), max(lasts, default=min(firsts))) if firsts else None

    @abstractmethod
    async def _deliver(self, send: Send, body: ChunkedBody | None) -> None: ...

    def _num_undelivered(self) -> int:
        """Return the number of sampled completion tokens that have not been sent to the client."""
        return sum(len(choice.token_ids) for choice in self._request.choices) - self.num_sent_tokens

    async def _watch(self, receive: Receive) -> None:
        await wait_for_disconnect(receive)
        self._request.fail(ClientGone("the client closed the connection"))

    async def _send_body(self, send: Send, body: bytes) -> None:
        headers = [*self.raw_headers, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _observe(self, arrived: Deltas, now: float) -> None:
        """Record the latency metrics of token deltas that are sent at time `now`, and the ends of choices."""
        for choice, delta in arrived:
            if count := len(delta.token_ids):
                last = self._last_token_seconds.get(choice.index)
                self._last_token_seconds[choice.index] = now
                if last is None:
                    self._first_token_seconds[choice.index] = last = now
                    self._metrics.observe("time_to_first_token_seconds", now - self._request.arrival_seconds)
                    count -= 1
                if count:
                    self._metrics.observe_inter_token((now - last) / count, count)
            if delta.finish is not None:
                self._observe_finish(choice, delta.finish)

    def _observe_finish(self, choice: Choice, finish: Finish) -> None:
        first, arrival = self._first_token_seconds.get(choice.index), self._request.arrival_seconds
        self._metrics.observe_finish(
            finish,
            e2e_seconds=time.monotonic() - arrival,
            ttft_seconds=None if first is None else first - arrival,
            max_tokens=choice.submit.params.max_tokens,
        )

    def _record_failure(self) -> None:
        """Count a failed request's unsent tokens as wasted, and record its failed choices in the metrics."""
        self._metrics.count_wasted_tokens("failed", self._num_undelivered())
        for choice in self._request.choices:
            if choice.finish is not None and choice.finish.reason in (FinishReason.ERROR, FinishReason.REFUSED):
                self._observe_finish(choice, choice.finish)


class CompletionDelivery(Delivery):
    """ASGI response of every route that generates text. A `ResponseBuilder` builds its events or body."""

    def __init__(self, request: InflightRequest, builder: ResponseBuilder, **delivery: Any) -> None:
        super().__init__(request, **delivery)
        self._builder = builder
        self.model, self.response_id = builder.asked.model, builder.response_id
        self._num_unfinished = len(request.choices)
        self._first_samples = {choice.prompt_index: choice for choice in reversed(request.choices)}.values()
        self._num_prompt_tokens = sum(choice.num_prompt_tokens for choice in self._first_samples)

    @property
    def num_reasoning_tokens(self) -> int | None:
        return self._builder.num_reasoning_tokens(self._request.choices)

    def _usage(self) -> Usage:
        """Return the token counts so far; after all choices have finished, with the cached and the reasoning tokens."""
        usage = Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self.num_sent_tokens,
            total_tokens=self._num_prompt_tokens + self.num_sent_tokens,
        )
        if not self._num_unfinished:
            cached = sum(choice.finish.num_cached_tokens for choice in self._first_samples if choice.finish)
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=cached)
            if (num_reasoning := self.num_reasoning_tokens) is not None:
                usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=num_reasoning)
        return usage

    def _timings(self) -> Timings:
        """Return the response field `timings`. Call only after all choices have finished."""
        choices = self._request.choices
        finishes = [choice.finish for choice in choices if choice.finish]
        earliest = min(finishes, key=lambda finish: finish.queue_seconds + finish.prefill_seconds)
        now = time.monotonic() if self.num_sent_tokens else None  # the first tokens are about to be sent
        first = min(self._first_token_seconds.values(), default=now)
        decode_seconds = max(finish.decode_seconds for finish in finishes)
        num_later_tokens = sum(max(0, len(choice.token_ids) - 1) for choice in choices)
        return Timings(
            queue_ms=_ms(earliest.queue_seconds),
            prefill_ms=_ms(earliest.prefill_seconds),
            ttft_ms=None if first is None else _ms(first - self._request.arrival_seconds),
            decode_ms=_ms(decode_seconds),
            tokens_per_second=round(num_later_tokens / decode_seconds, 2) if decode_seconds > 0 else None,
        )


class CompletionStream(CompletionDelivery):
    """Completion response as server-sent events. Status 200 is sent with the first event or keep-alive, not before."""

    media_type = "text/event-stream"

    def __init__(self, request: InflightRequest, builder: ResponseBuilder, **delivery: Any) -> None:
        super().__init__(request, builder, **delivery)
        self._unbegun = {choice.index for choice in request.choices}
        asked, options = builder.asked, builder.asked.stream_options
        self._sends_usage = options is not None and bool(options.include_usage)
        self._sends_running_usage = options is not None and bool(options.continuous_usage_stats)
        self._shows_tokens = bool(asked.return_token_ids) or asked.num_logprobs is not None
        # Between the first and the last event of a choice, only text has to be sent.
        self._is_plain = not (self._shows_tokens or self._sends_running_usage)

    def init_headers(self, headers: object = None) -> None:
        # X-Accel-Buffering: nginx would otherwise buffer events.
        super().init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def _deliver(self, send: Send, body: ChunkedBody | None) -> None:
        self._request.last_sent_seconds = time.monotonic()
        is_started = False
        at_once = None if body is None else partial(self._write_at_once, body)
        try:
            while self._num_unfinished:
                arrived = await self._request.next_deltas(None if self._unbegun else at_once)
                # The first event of a choice has the prompt's logprobs.
                unbegun = [self._request.choices[index] for index in self._unbegun]
                num_logprobs = sum(len(choice.prompt_logprobs) for choice in unbegun)
                encode_events = partial(self._events, arrived)
                is_long = num_logprobs > MAX_INLINE_LOGPROBS
                events = await call(encode_events, in_thread=is_long) if arrived else KEEP_ALIVE
                if events and not is_started:
                    is_started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    self._request.last_sent_seconds = time.monotonic()
                self._observe(arrived, time.monotonic())
        except ClientGone:
            raise
        except ApiError as error:
            if not is_started:
                raise
            self._record_failure()
            self._metrics.count("request_failures", str(error.status), error.type)
            await send({"type": "http.response.body", "body": self._builder.error_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _write_at_once(self, body: ChunkedBody, arrived: Deltas) -> Callable[[], None] | None:
        """Encode the token deltas of one engine step, and return a function that writes the bytes to the connection.

        Return None if a choice ends or the client reads too slowly: the response's task must send these deltas. Call
        only after each choice's first event.
        """
        if not body.is_writable:
            return None
        for _, delta in arrived:  # `any` of a generator takes twice as long
            if delta.finish is not None:
                return None
        events, now = self._events(arrived), time.monotonic()
        self._observe(arrived, now)
        if not events:
            return lambda: None  # the step brought no complete character
        self._request.last_sent_seconds = now
        return partial(body.write, events)

    def _events(self, arrived: Deltas) -> bytes:
        """Encode token deltas as events; after the last choice's end, add the stream's last events. b"": no events."""
        events: list[bytes] = []
        times: Timings | None = None
        for choice, delta in arrived:
            is_first = choice.index in self._unbegun
            if self._is_plain and delta.text and delta.finish is None and not is_first:
                self.num_sent_tokens += len(delta.token_ids)
                events.append(self._builder.plain_event(choice, delta.text))
                continue
            before = self._usage() if self._sends_running_usage else UNSET
            self.num_sent_tokens += len(delta.token_ids)
            # A delta without tokens carries logprobs of the prompt, which `choice` has already collected.
            has_visible_tokens = delta.token_ids and (self._shows_tokens or (is_first and choice.prompt_text))
            if not (delta.text or delta.finish or has_visible_tokens):
                continue  # such as an incomplete character
            self._num_unfinished -= delta.finish is not None
            self._unbegun.discard(choice.index)
            built = self._builder.events(choice, delta, is_first=is_first)
            if not built:
                continue  # such as the beginning of a tag, or of a tool's name
            if self._sends_running_usage:
                for opening in built[:-1]:
                    opening.usage = before
                built[-1].usage = self._usage()
            if not self._num_unfinished:
                times = self._timings()
                if self._builder.has_timings:
                    built[-1].timings = times
            events += map(self._builder.encode, built)
        if not self._num_unfinished:
            events += self._builder.end_of_stream(
                self._usage() if self._sends_usage else None, times or self._timings()
            )
        return b"".join(events)


class CompletionBody(CompletionDelivery):
    """Completion response as one JSON body, sent when every choice of the request is finished."""

    media_type = "application/json"

    async def _deliver(self, send: Send, body: ChunkedBody | None) -> None:
        parts: list[list[TokenDelta]] = [[] for _ in self._request.choices]
        while self._num_unfinished:
            arrived = await self._request.next_deltas()
            for choice, delta in arrived:
                parts[choice.index].append(delta)
                self._num_unfinished -= delta.finish is not None
            self._observe(arrived, time.monotonic())
        self.num_sent_tokens = self._num_undelivered()
        wholes = [(choice, _join(parts[choice.index])) for choice in self._request.choices]
        if self._builder.asked.is_ranked:
            wholes = best(wholes, self._builder.asked.value("n"))
        num_logprobs = sum(len(choice.prompt_logprobs) + len(whole.logprobs or ()) for choice, whole in wholes)
        usage, times = self._usage(), self._timings()
        is_long = num_logprobs > MAX_INLINE_LOGPROBS
        written = await call(lambda: encode(self._builder.body(wholes, usage, times)), in_thread=is_long)
        await self._send_body(send, written)


def _join(deltas: list[TokenDelta]) -> TokenDelta:
    """Join all token deltas of a choice to one token delta."""
    return msgspec.structs.replace(
        deltas[-1],
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs or ()),
    )


def best(wholes: Deltas, num_returned: int) -> Deltas:
    """Return the `num_returned` most likely completions of each prompt, ordered by prompt, then most likely first.

    Completions are ranked by mean logprob per token, as OpenAI documents `best_of`. Ties go to the earlier sample.
    """
    ranked = sorted(wholes, key=lambda whole: (whole[0].prompt_index, -_mean_logprob(whole[1])))
    by_prompt = itertools.groupby(ranked, key=lambda whole: whole[0].prompt_index)
    return [whole for _, samples in by_prompt for whole in itertools.islice(samples, num_returned)]


def _mean_logprob(whole: TokenDelta) -> float:
    """Return the mean logprob of a completion's tokens; 0 for a completion without tokens."""
    entries = whole.logprobs or ()
    return sum(entry.logprob or 0.0 for entry in entries) / len(entries) if entries else 0.0


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
