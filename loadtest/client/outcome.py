"""Outcome of one request, and the reader of a completion response as it arrives.

Times are `time.perf_counter()` seconds of the client's process, taken when the bytes came out of the socket. TTFT
and E2E count from the intended send: in an open loop, a late client must not flatter the server (coordinated
omission).
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import msgspec

from loadtest.client.workload import ClientKind, CompletionRequest


class Ending(StrEnum):
    """End of a request. Shed load is a valid response, not an error."""

    OK = "ok"
    CANCELLED = "cancelled"  # by the test client, as planned
    SHED = "shed"  # 429: rejected for load
    HTTP_ERROR = "http_error"  # any other status that is not 200
    STREAM_ERROR = "stream_error"  # an error event after a 200
    TIMEOUT = "timeout"
    CONNECTION = "connection"  # refused, reset, or ended before the response did
    CONTRACT = "contract"  # a complete response that breaks the API contract

    @property
    def is_failure(self) -> bool:
        """True if the ending is an error of the service."""
        return self not in (Ending.OK, Ending.CANCELLED, Ending.SHED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One measured request. Times are seconds on the client's clock, see the module docstring.

    chunk_seconds: arrival of each chunk with text; empty for a client that does not stream.
    prompt_tokens, cached_tokens, completion_tokens: the server's `usage`; 0 without it.
    retry_after_seconds: wait that the server asks of a rejected client; 0 without one.
    """

    index: int
    client: ClientKind
    ending: Ending
    detail: str
    intended_seconds: float
    sent_seconds: float
    chunk_seconds: tuple[float, ...]
    end_seconds: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    text: str
    retry_after_seconds: float = 0.0

    @property
    def ttft_seconds(self) -> float | None:
        """Intended send to first text; None without streamed text."""
        return self.chunk_seconds[0] - self.intended_seconds if self.chunk_seconds else None

    @property
    def itl_seconds(self) -> tuple[float, ...]:
        """Gaps between chunks of text."""
        return tuple(later - earlier for earlier, later in pairwise(self.chunk_seconds))

    @property
    def tpot_seconds(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1); None for fewer than two tokens or without streamed text."""
        if self.ttft_seconds is None or self.completion_tokens < 2:
            return None
        return (self.e2e_seconds - self.ttft_seconds) / (self.completion_tokens - 1)

    @property
    def e2e_seconds(self) -> float:
        """Intended send to the response's end."""
        return self.end_seconds - self.intended_seconds


class _CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _CachedTokens | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None

    def __str__(self) -> str:
        return f"{self.code or self.type or 'error'}: {self.message}"


class _Completion(msgspec.Struct):
    """Streamed chunk or whole body: only the fields that are read."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class CompletionReader:
    """Reader of one completion response, event by event. At the end it returns the outcome.

    chunk_seconds: arrival of each chunk with text or token ids so far.
    """

    def __init__(self, request: CompletionRequest) -> None:
        self.request = request
        self.chunk_seconds: list[float] = []
        self._decoder = msgspec.json.Decoder(_Completion)
        self._texts: list[str] = []
        self._finish_reasons: list[str] = []
        self._usage: _Usage | None = None
        self._saw_done = False
        self._error: str | None = None
        self._broken: str | None = None

    @property
    def wants_to_leave(self) -> bool:
        """True if a cancelling client has received the chunks after which it disconnects."""
        limit = self.request.cancel_after
        return limit is not None and len(self.chunk_seconds) >= limit

    def event(self, data: bytes, now: float) -> None:
        """Read one SSE event of a streamed response."""
        if data == b"[DONE]":
            self._saw_done = True
            return
        if self._saw_done:
            self._broken = "an event after [DONE]"
        self._read(data, now)

    def body(self, data: bytes) -> None:
        """Read the body of a response that is not streamed."""
        self._read(data, None)
        self._saw_done = True

    def _read(self, data: bytes, now: float | None) -> None:
        try:
            completion = self._decoder.decode(data)
        except msgspec.DecodeError as error:
            self._broken = f"not a completion: {error}"
            return
        if completion.error is not None:
            self._error = str(completion.error)
        if completion.usage is not None:
            self._usage = completion.usage
        for choice in completion.choices:
            self._texts.append(choice.text)
            if now is not None and (choice.text or choice.token_ids):
                self.chunk_seconds.append(now)
            if choice.finish_reason is not None:
                self._finish_reasons.append(choice.finish_reason)

    def judge(self, status: int) -> tuple[Ending, str]:
        """Return the ending of a complete response, and its reason."""
        if status == 429:
            return Ending.SHED, self._error or "429"
        if status != 200:
            return Ending.HTTP_ERROR, f"{status} {self._error or self._broken or ''}".rstrip()
        if self._error is not None:
            return Ending.STREAM_ERROR, self._error
        if (broken := self._broken or self._contract_breach()) is not None:
            return Ending.CONTRACT, broken
        return Ending.OK, ""

    def _contract_breach(self) -> str | None:
        """Return the way in which a finished completion breaks the API contract, or None."""
        wanted = self.request.max_tokens
        if not self._saw_done:
            return "a stream without [DONE]"
        if len(self._finish_reasons) != 1:
            return f"{len(self._finish_reasons)} finish reasons"
        if self._usage is None:
            return "no usage"
        if self._usage.completion_tokens > wanted:
            return f"{self._usage.completion_tokens} tokens where at most {wanted} were asked for"
        if self._finish_reasons[0] == "length" and self._usage.completion_tokens < wanted:
            return f"finish reason length after {self._usage.completion_tokens} of {wanted} tokens"
        return None

    def outcome(self, ending: Ending, detail: str, **times: float) -> Outcome:
        """Return the measured outcome. A stream cut short counts a token per chunk of text."""
        usage = self._usage
        details = usage.prompt_tokens_details if usage else None
        return Outcome(
            index=self.request.index,
            client=self.request.client,
            ending=ending,
            detail=detail,
            chunk_seconds=tuple(self.chunk_seconds),
            prompt_tokens=usage.prompt_tokens if usage else 0,
            cached_tokens=details.cached_tokens if details else 0,
            completion_tokens=usage.completion_tokens if usage else len(self.chunk_seconds),
            text="".join(self._texts),
            **times,
        )
