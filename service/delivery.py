"""How a completion leaves: a stream of server-sent events, or one body. Both join the same deltas.

Plain ASGI, one level deep: every wrapper around `send` is paid once a token.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from model.tokenizer.interface import Tokenizer
from service.chat_responses import Dialect
from service.errors import ApiError, ClientGone
from service.journal import Choice, LiveRequest
from service.logprobs import LogprobWriter
from service.messages import Finish, FinishReason, TokenDelta
from service.metrics import Metrics
from service.responses import (
    DONE,
    KEEP_ALIVE,
    Completion,
    CompletionChoice,
    Logprobs,
    PromptTokensDetails,
    Timings,
    Usage,
    encode,
    encode_event,
)

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What is the same in everything that is sent for a request, and what the client wants of it."""

    id: str
    created: int
    model: str
    echo: bool
    logprobs: bool
    include_usage: bool
    dialect: Dialect


class Delivery(Response, ABC):
    """The response of one live request. It ends the request, however it ends.

    Args:
        close: forgets the request and cancels what is unfinished.
    """

    def __init__(
        self,
        request: LiveRequest,
        answer: Answer,
        *,
        tokenizer: Tokenizer,
        metrics: Metrics,
        close: Callable[[LiveRequest], None],
    ) -> None:
        # Not Response's own: it would count the length of a body that is not here yet.
        self.status_code = 200
        self.background = None
        self.init_headers()
        self._request = request
        self._answer = answer
        self._metrics = metrics
        self._close = close
        self._logprobs = [LogprobWriter(tokenizer) for _ in request.choices] if answer.logprobs else None
        self._unwritten_prompts = {choice.index for choice in request.choices} if answer.echo else set()
        self._num_unfinished = len(request.choices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Deliver. A client that leaves, streaming or not, ends the request at once.

        Raises:
            ApiError: the request failed before anything was sent.
        """
        watcher = asyncio.create_task(_watch(receive, self._request))
        try:
            await self._deliver(send)
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
    async def _deliver(self, send: Send) -> None: ...

    @abstractmethod
    def _num_undelivered(self) -> int: ...

    def _piece(self, choice: Choice, delta: TokenDelta) -> CompletionChoice | None:
        """What a delta means to the client; None when there is nothing to show, as with half a character."""
        if not (delta.token_ids or delta.text or delta.finish):
            return None  # the prompt's logprobs, or a part of them: `choice` has gathered them
        text, written = delta.text, None
        if self._logprobs is not None:
            writer = self._logprobs[choice.index]
            if choice.index in self._unwritten_prompts:
                written = writer.write(choice.prompt_logprobs)
                writer.end_prompt()
            written = _extended(written, writer.write(delta.logprobs or ()))
        if choice.index in self._unwritten_prompts:
            self._unwritten_prompts.remove(choice.index)
            text = choice.prompt_text + text
        if delta.finish is not None:
            self._num_unfinished -= 1
        elif not text and (written is None or not written.tokens):
            return None
        return CompletionChoice(
            index=choice.index,
            text=text,
            logprobs=written,
            finish_reason=None if delta.finish is None else _FINISH_REASONS[delta.finish.reason],  # type: ignore[arg-type]
            stop_reason=None if delta.finish is None else delta.finish.stop_reason,
        )

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        answer = self._answer
        return Completion(id=answer.id, created=answer.created, model=answer.model, choices=choices)

    def _observe(self, arrived: list[tuple[Choice, TokenDelta]]) -> None:
        """Count tokens as they leave."""
        now, arrival = time.monotonic(), self._request.arrival_seconds
        for choice, delta in arrived:
            count = len(delta.token_ids)
            if count and choice.first_token_seconds is None:
                choice.first_token_seconds = choice.last_token_seconds = now
                self._metrics.observe_first_token(now - arrival)
                count -= 1
            if count and choice.last_token_seconds is not None:
                self._metrics.observe_inter_token((now - choice.last_token_seconds) / count, count)
                choice.last_token_seconds = now
            if delta.finish is not None:
                self._observe_finish(choice, delta.finish)

    def _observe_finish(self, choice: Choice, finish: Finish) -> None:
        first, arrival = choice.first_token_seconds, self._request.arrival_seconds
        self._metrics.observe_finish(
            finish,
            e2e_seconds=time.monotonic() - arrival,
            ttft_seconds=None if first is None else first - arrival,
            max_tokens=choice.submit.params.max_tokens,
        )

    def _fail(self) -> None:
        """Count what the request's failure cost."""
        self._metrics.count_wasted_tokens("failed", self._num_undelivered())
        for choice in self._request.choices:
            if choice.finish is not None and choice.finish.reason is FinishReason.ERROR:
                self._observe_finish(choice, choice.finish)


class CompletionStream(Delivery):
    """Server-sent events. The status is decided by the first event, or by the first long silence."""

    media_type = "text/event-stream"

    def init_headers(self, headers: object = None) -> None:
        # X-Accel-Buffering: nginx would otherwise collect events.
        super().init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def _deliver(self, send: Send) -> None:
        self._request.last_sent_seconds = time.monotonic()
        is_started = False
        try:
            while self._num_unfinished:
                arrived = await self._request.next_deltas()
                body = self._events(arrived) if arrived else KEEP_ALIVE
                if body and not is_started:
                    is_started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    self._request.last_sent_seconds = time.monotonic()
                self._observe(arrived)
        except ClientGone:
            raise
        except ApiError as error:
            if not is_started:
                raise
            self._fail()
            self._metrics.count_failure(error.status, error.type)
            await send({"type": "http.response.body", "body": encode_event(error.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _events(self, arrived: list[tuple[Choice, TokenDelta]]) -> bytes:
        """The events of these deltas, and the stream's end after the last choice's."""
        events: list[bytes] = []
        for choice, delta in arrived:
            if (piece := self._piece(choice, delta)) is not None:
                completion = self._completion([piece])
                if not self._num_unfinished:
                    completion.timings = timings(self._request)
                events += map(encode_event, self._answer.dialect.events(completion))
        if not self._num_unfinished:
            if self._answer.include_usage:
                summary = self._completion([])
                summary.usage, summary.timings = usage(self._request), timings(self._request)
                events += map(encode_event, self._answer.dialect.events(summary))
            events.append(DONE)
        return b"".join(events)

    def _num_undelivered(self) -> int:
        return 0  # sent as they came


class CompletionBody(Delivery):
    """One JSON body when every choice is finished."""

    media_type = "application/json"

    async def _deliver(self, send: Send) -> None:
        self._request.last_sent_seconds = float("inf")  # no sign of life is possible before the body
        pieces: list[list[CompletionChoice]] = [[] for _ in self._request.choices]
        while self._num_unfinished:
            arrived = await self._request.next_deltas()
            for choice, delta in arrived:
                if (piece := self._piece(choice, delta)) is not None:
                    pieces[choice.index].append(piece)
            self._observe(arrived)
        completion = self._completion([_whole(parts) for parts in pieces])
        completion.usage, completion.timings = usage(self._request), timings(self._request)
        body = encode(self._answer.dialect.body(completion))
        headers = [*self.raw_headers, (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _num_undelivered(self) -> int:
        return sum(len(choice.token_ids) for choice in self._request.choices)


async def _watch(receive: Receive, request: LiveRequest) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.fail(ClientGone("the client closed the connection"))


def usage(request: LiveRequest) -> Usage:
    """Tokens of a finished request."""
    first_samples = {choice.prompt_index: choice for choice in reversed(request.choices)}.values()
    num_prompt = sum(choice.num_prompt_tokens for choice in first_samples)
    num_completion = sum(len(choice.token_ids) for choice in request.choices)
    cached = sum(choice.finish.num_cached_tokens for choice in first_samples if choice.finish)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


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


def _extended(first: Logprobs | None, second: Logprobs) -> Logprobs:
    """The first with the second at its end."""
    if first is None:
        return second
    first.tokens += second.tokens
    first.token_logprobs += second.token_logprobs
    first.top_logprobs += second.top_logprobs
    first.text_offset += second.text_offset
    return first


def _whole(pieces: list[CompletionChoice]) -> CompletionChoice:
    """A choice's pieces as one. The last one has its end."""
    last, logprobs = pieces[-1], None
    for piece in pieces:
        logprobs = logprobs if piece.logprobs is None else _extended(logprobs, piece.logprobs)
    return msgspec.structs.replace(last, text="".join(piece.text for piece in pieces), logprobs=logprobs)
