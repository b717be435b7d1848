"""Outcome of one request.

Times are `time.perf_counter()` seconds of the client's process, taken when the bytes came out of the socket. TTFT
and E2E count from the intended send: in an open loop, a late client must not flatter the server (coordinated
omission).
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from loadtest.client.workload import ClientKind


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
