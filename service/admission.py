"""Who may wait, and what the others are told: a bound on sequences and on tokens, and an honest Retry-After."""

import math
import time
from collections.abc import Callable

from service.errors import Overloaded

# How far back the observed rates look. Long enough to average over a batch, short enough to follow the load.
_MEMORY_SECONDS = 30.0
# What a refused client is told before any request has finished.
_UNKNOWN_WAIT_SECONDS = 1.0
# SDKs ignore a Retry-After of over two minutes.
_LONGEST_WAIT_SECONDS = 120.0


class Rate:
    """An exponentially weighted average of something per second of busy time. Idle time does not dilute it."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Count `amount`, spread evenly over the `seconds` since the last call."""
        keep = math.exp(-seconds / _MEMORY_SECONDS)
        weighted_seconds = _MEMORY_SECONDS * (1.0 - keep)  # of this interval, as seen from its end
        weight = weighted_seconds / seconds if seconds > 0.0 else 1.0
        self._amount = self._amount * keep + amount * weight
        self._seconds = self._seconds * keep + weighted_seconds

    def seconds_for(self, amount: float) -> float:
        """How long `amount` takes at the observed rate; a second when nothing was observed."""
        if self._amount <= 0.0 or self._seconds <= 0.0:
            return _UNKNOWN_WAIT_SECONDS
        return amount * self._seconds / self._amount


class Admission:
    """Counts the sequences that were admitted and have not ended.

    A sequence waits until its first event from the engine. `num_tokens` is the most it can come to: prompt plus
    max_tokens.
    """

    def __init__(
        self,
        *,
        max_num_running: int,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_num_sequences = max_num_running + max_waiting_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._last_seconds = clock()
        self._finished, self._started_tokens = Rate(), Rate()
        self.num_sequences = 0
        self.num_waiting_tokens = 0

    def admit(self, token_counts: list[int]) -> None:
        """Let in the sequences of one request, all or none. An idle server admits any request.

        Raises:
            Overloaded: there is no room; says after how many seconds there should be.
        """
        excess_sequences = self.num_sequences + len(token_counts) - self.max_num_sequences
        excess_tokens = self.num_waiting_tokens + sum(token_counts) - self._max_waiting_tokens
        if self.num_waiting_tokens == 0:
            excess_tokens = 0
        if excess_sequences > 0 or excess_tokens > 0:
            self._advance()
            seconds = max(
                self._finished.seconds_for(excess_sequences) if excess_sequences > 0 else 0.0,
                self._started_tokens.seconds_for(excess_tokens) if excess_tokens > 0 else 0.0,
            )
            raise Overloaded(
                f"the server is full: {self.num_sequences} completions are running or waiting, try again later",
                retry_after_seconds=min(seconds, _LONGEST_WAIT_SECONDS),
            )
        self._advance()
        self.num_sequences += len(token_counts)
        self.num_waiting_tokens += sum(token_counts)

    def started(self, num_tokens: int) -> None:
        """A sequence of that many tokens waits no longer."""
        self._advance(tokens=num_tokens)
        self.num_waiting_tokens -= num_tokens

    def ended(self) -> None:
        """A sequence has left, whatever the reason, after it was `started`."""
        self._advance(sequences=1)
        self.num_sequences -= 1

    def _advance(self, *, sequences: int = 0, tokens: int = 0) -> None:
        now = self._clock()
        seconds = now - self._last_seconds if self.num_sequences else 0.0
        self._last_seconds = now
        self._finished.add(sequences, seconds)
        self._started_tokens.add(tokens, seconds)
