"""How a completion leaves: a stream of server-sent events, or one body. Both join the same deltas.

Plain ASGI, one level deep: every wrapper around `send` is paid once a token.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.best_of import best
from service.dialects import Dialect, Piece
from service.errors import ApiError, ClientGone
from service.live_request import Choice, LiveRequest, News
from service.messages import Finish, FinishReason, TokenDelta
from service.metrics import Metrics
from service.open_body import OpenBody, open_body
from service.responses import DONE, KEEP_ALIVE, PromptTokensDetails, Timings, Usage, encode, encode_event

# Tokens whose log-probabilities take about as long to write as a step takes: 20 µs each, with 20 alternatives.
MANY_SCORES = 500


class Delivery(Response, ABC):
    """The response of one live request. It ends the request, however it ends.

    Args:
        dialect: words the answer.
        close: forgets the request and cancels what is unfinished.
    """

    def __init__(
        self,
        request: LiveRequest,
        dialect: Dialect,
        *,
        metrics: Metrics,
        close: Callable[[LiveRequest], None],
    ) -> None:
        # Not Response's own: it would count the length of a body that is not here yet.
        self.status_code = 200
        self.background = None
        self.init_headers()
        self._request = request
        self._dialect = dialect
        self._wants = wants = dialect.answer.wants
        # The best is known by all its tokens, though nobody is told them.
        self._shows_tokens = wants.token_ids or wants.logprobs is not None or wants.num_best is not None
        # Between a choice's first event and its last there is but text to tell.
        self._is_plain = not (self._shows_tokens or wants.running_usage)
        self._metrics = metrics
        self._close = close
        self._unbegun = {choice.index for choice in request.choices}
        self._num_unfinished = len(request.choices)
        self._first_samples = {choice.prompt_index: choice for choice in reversed(request.choices)}.values()
        self._num_prompt_tokens = sum(choice.num_prompt_tokens for choice in self._first_samples)
        self._num_completion_tokens = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Deliver. A client that leaves, streaming or not, ends the request at once.

        Raises:
            ApiError: the request failed before anything was sent.
        """
        watcher = asyncio.create_task(_watch(receive, self._request))
        try:
            await self._deliver(send, open_body(scope))
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
    async def _deliver(self, send: Send, body: OpenBody | None) -> None: ...

    @abstractmethod
    def _num_undelivered(self) -> int: ...

    @property
    def num_sent_tokens(self) -> int:
        """Completion tokens that were sent, or are in what is sent next."""
        return self._num_completion_tokens

    def _piece(self, choice: Choice, delta: TokenDelta) -> Piece | None:
        """What a delta means to the client; None when there is nothing to show, as with half a character."""
        self._num_completion_tokens += len(delta.token_ids)
        is_first = choice.index in self._unbegun
        # Without a token come the prompt's logprobs, or a part of them: `choice` has gathered them.
        are_tokens_shown = delta.token_ids and (self._shows_tokens or (is_first and choice.prompt_text))
        if not (delta.text or delta.finish or are_tokens_shown):
            return None
        self._unbegun.discard(choice.index)
        self._num_unfinished -= delta.finish is not None
        return Piece(
            choice=choice,
            is_first=is_first,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs or (),
            finish=delta.finish,
        )

    def _usage(self) -> Usage:
        """Tokens so far. What was cached is known when all choices are finished."""
        told = Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
        )
        if not self._num_unfinished:
            cached = sum(choice.finish.num_cached_tokens for choice in self._first_samples if choice.finish)
            told.prompt_tokens_details = PromptTokensDetails(cached_tokens=cached)
        return told

    def _observe(self, arrived: News, now: float) -> None:
        """Count tokens as they leave."""
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
        """Count what the request's failure cost."""
        self._metrics.count_wasted_tokens("failed", self._num_undelivered())
        for choice in self._request.choices:
            if choice.finish is not None and choice.finish.reason in (FinishReason.ERROR, FinishReason.REFUSED):
                self._observe_finish(choice, choice.finish)


class CompletionStream(Delivery):
    """Server-sent events. The status is decided by the first event, or by the first long silence."""

    media_type = "text/event-stream"

    def init_headers(self, headers: object = None) -> None:
        # X-Accel-Buffering: nginx would otherwise collect events.
        super().init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def _deliver(self, send: Send, body: OpenBody | None) -> None:
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

    def _write_at_once(self, body: OpenBody, arrived: News) -> Callable[[], None] | None:
        """The events of a step, to be sent in the turn in which they came. None for the stream's first and last ones,
        which the task sends, and where the client is behind."""
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

    def _num_prompt_scores(self, arrived: News) -> int:
        """What is the prompt's comes with a choice's first event."""
        begin = self._unbegun.intersection([choice.index for choice, _ in arrived])
        return sum(len(self._request.choices[index].prompt_logprobs) for index in begin)

    def _events(self, arrived: News) -> bytes:
        """The events of these deltas, and the stream's end after the last choice's."""
        events: list[bytes] = []
        times: Timings | UnsetType = UNSET
        for choice, delta in arrived:
            if self._is_plain and delta.text and delta.finish is None and choice.index not in self._unbegun:
                self._num_completion_tokens += len(delta.token_ids)
                events.append(self._dialect.plain_event(choice, delta.text))
                continue
            before = self._usage() if self._wants.running_usage else UNSET
            if (piece := self._piece(choice, delta)) is None:
                continue
            if (opening := self._dialect.opening(piece)) is not None:
                opening.usage = before
                events.append(encode_event(opening))
            event = self._dialect.event(piece)
            if self._wants.running_usage:
                event.usage = self._usage()
            if not self._num_unfinished:
                times = event.timings = timings(self._request)
            events.append(encode_event(event))
        if not self._num_unfinished:
            if self._wants.usage:
                summary = self._dialect.summary()
                summary.usage, summary.timings = self._usage(), times
                events.append(encode_event(summary))
            events.append(DONE)
        return b"".join(events)

    def _num_undelivered(self) -> int:
        return self._num_received() - self._num_completion_tokens  # sent as they came


class CompletionBody(Delivery):
    """One JSON body when every choice is finished."""

    media_type = "application/json"

    async def _deliver(self, send: Send, body: OpenBody | None) -> None:
        self._request.last_sent_seconds = float("inf")  # no sign of life is possible before the body
        pieces: list[list[Piece]] = [[] for _ in self._request.choices]
        while self._num_unfinished:
            arrived = await self._request.next_deltas()
            for choice, delta in arrived:
                if (piece := self._piece(choice, delta)) is not None:
                    pieces[choice.index].append(piece)
            self._observe(arrived, time.monotonic())
        wholes = [_whole(parts) for parts in pieces]
        if self._wants.num_best is not None:
            wholes = best(wholes, self._wants.num_best)
        num_scores = sum(len(piece.choice.prompt_logprobs) + len(piece.logprobs) for piece in wholes)
        usage, times = self._usage(), timings(self._request)
        whole = await _written(lambda: encode(self._dialect.body(wholes, usage, times)), num_scores)
        headers = [*self.raw_headers, (b"content-length", b"%d" % len(whole))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": whole, "more_body": False})

    def _num_undelivered(self) -> int:
        return self._num_received()


async def _written(write: Callable[[], bytes], num_scores: int) -> bytes:
    """What `write` gives. Of many scores it is done beside the event loop, where everybody's streams are."""
    return await asyncio.to_thread(write) if num_scores > MANY_SCORES else write()


def _nothing() -> None:
    """Half a character has come: nothing is to be sent yet."""


async def _watch(receive: Receive, request: LiveRequest) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.fail(ClientGone("the client closed the connection"))


def timings(request: LiveRequest) -> Timings:
    """Times of a finished request."""
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


def _whole(pieces: list[Piece]) -> Piece:
    """A choice's pieces as one. The last one has its end."""
    return Piece(
        choice=pieces[0].choice,
        is_first=True,
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        logprobs=[entry for piece in pieces for entry in piece.logprobs],
        finish=pieces[-1].finish,
    )
