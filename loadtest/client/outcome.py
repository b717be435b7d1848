"""Outcomes of measured requests and loads. Times are seconds of `time.perf_counter()`.

Latency counts from the intended send: in an open loop, a late client must not flatter the server.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Self

from loadtest.client.workload import ClientKind


class Ending(StrEnum):
    """Reason for the end of a request. A 429 is a valid response of a full service, not an error."""

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
        """True if this end of a request is an error of the service."""
        return self not in (Ending.OK, Ending.CANCELLED, Ending.SHED)


@dataclass(kw_only=True, slots=True)
class Outcome:
    """One measured request, filled in while its response arrives.

    chunk_seconds: arrival of each chunk with text or token ids; empty for a client that does not stream.
    completion_tokens: as in the server's `usage`; without `usage`, number of chunks.
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
    cached_tokens: int = 0
    completion_tokens: int = 0
    text: str = ""
    retry_after_seconds: float = 0.0

    @property
    def ttft_seconds(self) -> float | None:
        """Time from the intended send to the first text of the response; None without streamed text."""
        return self.chunk_seconds[0] - self.intended_seconds if self.chunk_seconds else None

    @property
    def itl_seconds(self) -> list[float]:
        """Seconds between consecutive chunks of text of the response."""
        return [later - earlier for earlier, later in pairwise(self.chunk_seconds)]

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token: (E2E - TTFT) / (tokens - 1). None for fewer than two tokens or no streamed text."""
        if self.ttft_seconds is None or self.completion_tokens < 2:
            return None
        return (self.e2e_seconds - self.ttft_seconds) / (self.completion_tokens - 1)

    @property
    def e2e_seconds(self) -> float:
        """Time from the intended send to the end of the response."""
        return self.end_seconds - self.intended_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRun:
    """Load on a service, measured between two times: the first intended send and the last end, or closer ones.

    client_cpu_share: CPU time of the client's process over wall time; 1 is one core.
    """

    outcomes: Sequence[Outcome]
    began_seconds: float
    ended_seconds: float
    client_cpu_share: float

    @classmethod
    def ended_now(cls, outcomes: Sequence[Outcome], began_seconds: float, began_cpu_seconds: float) -> Self:
        """Return a load that ends now and began at these values of `time.perf_counter()` and `time.process_time()`."""
        cpu_share = (time.process_time() - began_cpu_seconds) / max(time.perf_counter() - began_seconds, 1e-9)
        first = min((outcome.intended_seconds for outcome in outcomes), default=began_seconds)
        last = max([first + 1e-9, *(outcome.end_seconds for outcome in outcomes)])
        return cls(outcomes=outcomes, began_seconds=first, ended_seconds=last, client_cpu_share=cpu_share)

    @property
    def duration_seconds(self) -> float:
        """Measured time of the load."""
        return self.ended_seconds - self.began_seconds

    @property
    def sent(self) -> list[Outcome]:
        """Outcomes of the requests that were meant to be sent in the measured time of the load."""
        return [outcome for outcome in self.outcomes if self._is_inside(outcome.intended_seconds)]

    @property
    def requests_per_second(self) -> float:
        """Completions that ended successfully in the measured time of the load, per second."""
        done = (outcome for outcome in self.outcomes if outcome.ending is Ending.OK)
        return sum(self._is_inside(outcome.end_seconds) for outcome in done) / self.duration_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of successful completions that arrived in the measured time of the load, per second.

        A completion that extends beyond the measured time counts by the share of its chunks inside.
        """
        tokens = 0.0
        for outcome in (outcome for outcome in self.outcomes if outcome.ending is Ending.OK):
            moments = outcome.chunk_seconds or [outcome.end_seconds]
            tokens += outcome.completion_tokens * sum(map(self._is_inside, moments)) / len(moments)
        return tokens / self.duration_seconds

    def _is_inside(self, seconds: float) -> bool:
        return self.began_seconds <= seconds <= self.ended_seconds
