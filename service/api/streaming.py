"""Responses of completions: a stream of server-sent events, or one JSON body, made from the same deltas.

Plain ASGI without further layers, since every wrapper around `send` costs time for every token.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.best_of import best
from service.api.response_builder import ResponseBuilder, TokenPiece
from service.http.connection import ChunkedBody, chunked_body
from service.ipc.messages import Finish, FinishReason, TokenDelta
from service.metrics.recorder import Metrics
from service.protocol.errors import ApiError, ClientGone
from service.protocol.responses import DONE, KEEP_ALIVE, PromptTokensDetails, Timings, Usage, encode, encode_event
from service.requests.inflight import Choice, Deltas, InflightRequest

# Number of logprob entries that take about as long to encode as a step takes: 20 µs each, with 20 alternatives.
MAX_INLINE_LOGPROBS = 500


class Delivery(Response, ABC):
    """Response of one live request. The request is closed when the response ends, for whatever reason.

    Args:
        builder: builds the events or the body.
        close: removes the request and cancels its unfinished sequences.
    """

    def __init__(
        self,
        request: InflightRequest,
        builder: ResponseBuilder,
        *,
        metrics: Metrics,
        close: Callable[[InflightRequest], None],
    ) -> None:
        # Response.__init__ is not called: it would set Content-Length, and the body is unknown yet.
        self.status_code = 200
        self.background = None
        self.init_headers()
        self._request = request
        self._builder = builder
        self._response_options = response_options = builder.answer.response_options
        # best_of ranks completions by the logprobs of all their tokens, even if no logprobs are returned.
        self._shows_tokens = (
            response_options.token_ids or response_options.logprobs is not None or response_options.num_best is not None
        )
        # Between the first and the last event of a choice, only text has to be sent.
        self._is_plain = not (self._shows_tokens or response_options.running_usage)
        self._metrics = metrics
        self._close = close
        self._unbegun = {choice.index for choice in request.choices}
        self._num_unfinished = len(request.choices)
        self._first_samples = {choice.prompt_index: choice for choice in reversed(request.choices)}.values()
        self._num_prompt_tokens = sum(choice.num_prompt_tokens for choice in self._first_samples)
        self._num_completion_tokens = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. A client that disconnects ends the request at once, streaming or not.

        Raises:
            ApiError: the request failed before anything was sent.
        """
        watcher = asyncio.create_task(_watch(receive, self._request))
        try:
            await self._deliver(send, chunked_body(scope))
        except ClientGone:
            has_started = any(choice.has_started for choice in self._request.choices)
            self._metrics.count_cancellation("running" if has_started else "waiting")
            self._metrics.count_wasted_tokens("cancelled", self._num_undelivered())
        except ApiError:
            self._fail()
            raise
        finally:
            watcher.cancel()
            self._close(self._request)

    @abstractmethod
    async def _deliver(self, send: Send, body: ChunkedBody | None) -> None: ...

    @abstractmethod
    def _num_undelivered(self) -> int: ...

    @property
    def num_sent_tokens(self) -> int:
        """Number of completion tokens in the events sent so far and in the event that is sent next."""
        return self._num_completion_tokens

    def _piece(self, choice: Choice, delta: TokenDelta) -> TokenPiece | None:
        """Return the piece of a delta; None if there is nothing to show, as with an incomplete character."""
        self._num_completion_tokens += len(delta.token_ids)
        is_first = choice.index in self._unbegun
        # A delta without tokens carries logprobs of the prompt, which `choice` has already collected.
        are_tokens_shown = delta.token_ids and (self._shows_tokens or (is_first and choice.prompt_text))
        if not (delta.text or delta.finish or are_tokens_shown):
            return None
        self._unbegun.discard(choice.index)
        self._num_unfinished -= delta.finish is not None
        return TokenPiece(
            choice=choice,
            is_first=is_first,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs or (),
            finish=delta.finish,
        )

    def _usage(self) -> Usage:
        """Return the token counts so far. The cached prompt tokens are known once all choices are finished."""
        usage = Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
        )
        if not self._num_unfinished:
            cached = sum(choice.finish.num_cached_tokens for choice in self._first_samples if choice.finish)
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=cached)
        return usage

    def _observe(self, arrived: Deltas, now: float) -> None:
        """Record the latency metrics of deltas that are being sent."""
        for choice, delta in arrived:
            count = len(delta.token_ids)
            if count and choice.first_token_seconds is None:
                choice.first_token_seconds = choice.last_token_seconds = now
                self._metrics.observe_first_token(now - self._request.arrival_seconds)
                count -= 1
            if count and choice.last_token_seconds is not None:
                self._metrics.observe_inter_token((now - choice.last_token_seconds) / count, count)
                choice.last_token_seconds = now
            if delta.finish is not None:
                self._observe_finish(choice, delta.finish)

    def _observe_finish(self, choice: Choice, finish: Finish) -> None:
        first, arrival = choice.first_token_seconds, self._request.arrival_seconds
        self._metrics.flush()
        self._metrics.observe_finish(
            finish,
            e2e_seconds=time.monotonic() - arrival,
            ttft_seconds=None if first is None else first - arrival,
            max_tokens=choice.submit.params.max_tokens,
        )

    def _num_received(self) -> int:
        return sum(len(choice.token_ids) for choice in self._request.choices)

    def _fail(self) -> None:
        """Record the metrics of a failed request."""
        self._metrics.count_wasted_tokens("failed", self._num_undelivered())
        for choice in self._request.choices:
            if choice.finish is not None and choice.finish.reason in (FinishReason.ERROR, FinishReason.REFUSED):
                self._observe_finish(choice, choice.finish)


class CompletionStream(Delivery):
    """Server-sent events. The HTTP status is sent with the first event, or with the first keep-alive comment."""

    media_type = "text/event-stream"

    def init_headers(self, headers: object = None) -> None:
        # X-Accel-Buffering: nginx would otherwise buffer events.
        super().init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def _deliver(self, send: Send, body: ChunkedBody | None) -> None:
        self._request.last_sent_seconds = time.monotonic()
        is_started = False
        at_once = None if body is None else partial(self._write_at_once, body)
        try:
            while self._num_unfinished:
                arrived = await self._request.next_deltas(at_once)
                num_scores = self._num_prompt_scores(arrived) if self._unbegun else 0
                events = await _written(partial(self._events, arrived), num_scores) if arrived else KEEP_ALIVE
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
            self._fail()
            self._metrics.count_failure(error.status, error.type)
            await send({"type": "http.response.body", "body": encode_event(error.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _write_at_once(self, body: ChunkedBody, arrived: Deltas) -> Callable[[], None] | None:
        """Return a callback that writes a step's events within the event-loop turn in which the events came.

        Return None if the task must send the events instead: while a choice has no event yet, when a choice ends, or if
        the client reads too slowly.
        """
        if self._unbegun or not body.is_writable:
            return None
        for _, delta in arrived:  # `any` of a generator takes twice as long
            if delta.finish is not None:
                return None
        events, now = self._events(arrived), time.monotonic()
        self._observe(arrived, now)
        if not events:
            return _nothing
        self._request.last_sent_seconds = now
        return partial(body.write, events)

    def _num_prompt_scores(self, arrived: Deltas) -> int:
        """Return the number of prompt logprobs in these events. A choice's first event carries all of them."""
        begin = self._unbegun.intersection([choice.index for choice, _ in arrived])
        return sum(len(self._request.choices[index].prompt_logprobs) for index in begin)

    def _events(self, arrived: Deltas) -> bytes:
        """Return the encoded events of these deltas, and the end of the stream once all choices are finished."""
        events: list[bytes] = []
        times: Timings | UnsetType = UNSET
        for choice, delta in arrived:
            if self._is_plain and delta.text and delta.finish is None and choice.index not in self._unbegun:
                self._num_completion_tokens += len(delta.token_ids)
                events.append(self._builder.plain_event(choice, delta.text))
                continue
            before = self._usage() if self._response_options.running_usage else UNSET
            if (piece := self._piece(choice, delta)) is None:
                continue
            if (opening := self._builder.opening(piece)) is not None:
                opening.usage = before
                events.append(encode_event(opening))
            event = self._builder.event(piece)
            if self._response_options.running_usage:
                event.usage = self._usage()
            if not self._num_unfinished:
                times = event.timings = timings(self._request)
            events.append(encode_event(event))
        if not self._num_unfinished:
            if self._response_options.usage:
                summary = self._builder.summary()
                summary.usage, summary.timings = self._usage(), times
                events.append(encode_event(summary))
            events.append(DONE)
        return b"".join(events)

    def _num_undelivered(self) -> int:
        return self._num_received() - self._num_completion_tokens


class CompletionBody(Delivery):
    """One JSON body, sent when every choice is finished."""

    media_type = "application/json"

    async def _deliver(self, send: Send, body: ChunkedBody | None) -> None:
        self._request.last_sent_seconds = float("inf")  # no keep-alive can be sent before the body
        pieces: list[list[TokenPiece]] = [[] for _ in self._request.choices]
        while self._num_unfinished:
            arrived = await self._request.next_deltas()
            for choice, delta in arrived:
                if (piece := self._piece(choice, delta)) is not None:
                    pieces[choice.index].append(piece)
            self._observe(arrived, time.monotonic())
        wholes = [_whole(parts) for parts in pieces]
        if self._response_options.num_best is not None:
            wholes = best(wholes, self._response_options.num_best)
        num_scores = sum(len(piece.choice.prompt_logprobs) + len(piece.logprobs) for piece in wholes)
        usage, times = self._usage(), timings(self._request)
        whole = await _written(lambda: encode(self._builder.body(wholes, usage, times)), num_scores)
        headers = [*self.raw_headers, (b"content-length", b"%d" % len(whole))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": whole, "more_body": False})

    def _num_undelivered(self) -> int:
        return self._num_received()


async def _written(write: Callable[[], bytes], num_scores: int) -> bytes:
    """Return the result of `write`. With many logprobs a thread runs it, so that other streams do not wait."""
    return await asyncio.to_thread(write) if num_scores > MAX_INLINE_LOGPROBS else write()


def _nothing() -> None:
    """Send nothing: the step brought no complete character."""


async def _watch(receive: Receive, request: InflightRequest) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.fail(ClientGone("the client closed the connection"))


def timings(request: InflightRequest) -> Timings:
    """Return the times of a finished request."""
    finishes = [choice.finish for choice in request.choices if choice.finish]
    earliest = min(finishes, key=lambda finish: finish.queue_seconds + finish.prefill_seconds)
    firsts = [c.first_token_seconds for c in request.choices if c.first_token_seconds is not None]
    now = time.monotonic()
    first = min(firsts, default=now if any(c.token_ids for c in request.choices) else None)
    decode_seconds = max(finish.decode_seconds for finish in finishes)
    num_later_tokens = sum(max(0, len(choice.token_ids) - 1) for choice in request.choices)
    return Timings(
        queue_ms=_ms(earliest.queue_seconds),
        prefill_ms=_ms(earliest.prefill_seconds),
        ttft_ms=None if first is None else _ms(first - request.arrival_seconds),
        decode_ms=_ms(decode_seconds),
        tokens_per_second=round(num_later_tokens / decode_seconds, 2) if decode_seconds > 0 else None,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _whole(pieces: list[TokenPiece]) -> TokenPiece:
    """Join the pieces of a choice. The last piece has the finish."""
    return TokenPiece(
        choice=pieces[0].choice,
        is_first=True,
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        logprobs=[entry for piece in pieces for entry in piece.logprobs],
        finish=pieces[-1].finish,
    )
