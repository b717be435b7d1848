"""Measured times and results of the requests of a load test. Times are seconds of `time.perf_counter()`.

Latency counts from the time at which a request was meant to be sent. A client that sends late would otherwise hide
latency of the server.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Self


class ClientKind(StrEnum):
    """Behaviour of a load-test client while it receives a response."""

    STREAMING = "streaming"
    WHOLE = "whole"  # does not stream
    CANCELLING = "cancelling"  # streams, and disconnects before the end
    SLOW = "slow"  # streams, and reads slowly: its latencies say nothing about the server


class Ending(StrEnum):
    """Result of one request of a load test. A rejection with 429 by a full service (SHED) is not a failure."""

    OK = "ok"
    CANCELLED = "cancelled"  # by the test client, as planned
    SHED = "shed"  # 429: rejected for load
    HTTP_ERROR = "http_error"  # any other status that is not 200
    STREAM_ERROR = "stream_error"  # an error event after a 200
    TIMEOUT = "timeout"
    CONNECTION = "connection"  # refused, reset, or ended before the response did
    CONTRACT = "contract"  # a complete response that breaks the API contract
    INVALID = "invalid-answer"  # a complete response that is not JSON of the schema, or not a call of the tool
    CHANGED = "changed-answer"  # a complete response to a canary with another text than on the idle server

    @property
    def is_failure(self) -> bool:
        """True if the request failed. A planned disconnect and a 429 are no failures."""
        return self not in (Ending.OK, Ending.CANCELLED, Ending.SHED)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Times, token counts and result of one request of a load test, filled in while its response arrives.

    chunk_seconds: arrival time of each streamed chunk with text or token ids; empty if the client does not stream.
    completion_tokens: number in the response's `usage`; the number of chunks if the response has no `usage`.
    kind: kind of the request, in words. tool_calls: calls in the answer, as a later message repeats them.
    embedding_size: length of the vector in the response.
    """

    index: int
    client: ClientKind
    intended_seconds: float
    sent_seconds: float
    ending: Ending = Ending.OK
    detail: str = ""
    chunk_seconds: list[float] = field(default_factory=list)
    end_seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    kind: str = "completion"
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    embedding_size: int = 0
    retry_after_seconds: float = 0.0

    @property
    def ttft_seconds(self) -> float | None:
        """Seconds from the intended send to the first chunk of the stream; None without a chunk."""
        return self.chunk_seconds[0] - self.intended_seconds if self.chunk_seconds else None

    @property
    def itl_seconds(self) -> list[float]:
        """Seconds between each two consecutive chunks of the stream; empty for fewer than two chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunk_seconds)]

    @property
    def tpot_seconds(self) -> float | None:
        """Seconds per output token: (E2E - TTFT) / (tokens - 1). None for fewer than two tokens, or without a chunk."""
        if self.ttft_seconds is None or self.completion_tokens < 2:
            return None
        return (self.e2e_seconds - self.ttft_seconds) / (self.completion_tokens - 1)

    @property
    def e2e_seconds(self) -> float:
        """Seconds from the intended send to the end of the response."""
        return self.end_seconds - self.intended_seconds

    def moved(self, seconds: float) -> Self:
        """Return this outcome without its text, and with all times moved, to another clock."""
        names = ("intended_seconds", "sent_seconds", "end_seconds")
        times = {name: getattr(self, name) + seconds for name in names}
        return replace(self, text="", chunk_seconds=[moment + seconds for moment in self.chunk_seconds], **times)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRun:
    """Requests of one load test, and the interval in which requests and tokens are counted.

    began_seconds, ended_seconds: the interval; by default, from the first intended send to the last end of a response.
    client_cpu_share: CPU time of the load test's process over wall time; 1 is one busy core.
    """

    outcomes: Sequence[Outcome]
    began_seconds: float
    ended_seconds: float
    client_cpu_share: float

    @classmethod
    def ended_now(cls, outcomes: Sequence[Outcome], began_seconds: float, began_cpu_seconds: float) -> Self:
        """Return the `LoadRun` of a load whose requests have all ended, from the first intended send to the last end.

        The client's CPU share is measured from the beginning of the load until now.
        began_...: `time.perf_counter()` and `time.process_time()` when the load began.
        """
        cpu_share = (time.process_time() - began_cpu_seconds) / max(time.perf_counter() - began_seconds, 1e-9)
        first = min((outcome.intended_seconds for outcome in outcomes), default=began_seconds)
        last = max([first + 1e-9, *(outcome.end_seconds for outcome in outcomes)])
        return cls(outcomes=outcomes, began_seconds=first, ended_seconds=last, client_cpu_share=cpu_share)

    @property
    def duration_seconds(self) -> float:
        """Length in seconds of the interval in which requests and tokens are counted."""
        return self.ended_seconds - self.began_seconds

    @property
    def sent(self) -> list[Outcome]:
        """Outcomes of the requests that were meant to be sent within the counted interval."""
        return [outcome for outcome in self.outcomes if self._is_inside(outcome.intended_seconds)]

    @property
    def requests_per_second(self) -> float:
        """Number of requests that ended successfully within the counted interval, per second of the interval."""
        done = (outcome for outcome in self.outcomes if outcome.ending is Ending.OK)
        return sum(self._is_inside(outcome.end_seconds) for outcome in done) / self.duration_seconds

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens that arrived within the counted interval, per second of the interval.

        Only successful requests count. A completion that began before the interval or ended after it counts by the
        share of its chunks within the interval.
        """
        shares = self._shares()
        return sum(outcome.completion_tokens * share for outcome, share in shares) / self.duration_seconds

    @property
    def served_per_second(self) -> float:
        """Requests served within the counted interval, per second: as `tokens_per_second`, with 1 for each request."""
        return sum(share for _, share in self._shares()) / self.duration_seconds

    def _shares(self) -> Iterator[tuple[Outcome, float]]:
        """Yield successful requests with the share of their chunks within the counted interval."""
        for outcome in (outcome for outcome in self.outcomes if outcome.ending is Ending.OK):
            if outcome.intended_seconds <= self.ended_seconds and outcome.end_seconds >= self.began_seconds:
                moments = outcome.chunk_seconds or [outcome.end_seconds]
                yield outcome, sum(map(self._is_inside, moments)) / len(moments)

    def _is_inside(self, seconds: float) -> bool:
        return self.began_seconds <= seconds <= self.ended_seconds
