"""Protocol of the drivers: JSON lines. Imports only the standard library.

    driver   {"ready": true}
    request  {"prompts": [[5, 17, ...], ...], "output_tokens": 128}
    driver   {"first_seconds": 0.05, "total_seconds": 0.71, "later_tokens": 2032, "token_ids": [8, 3, ...]}

A driver continues every prompt greedily by exactly `output_tokens` tokens and ignores end-of-text tokens.

first_seconds: time until the last sequence had its first token. total_seconds: time until all were done.
later_tokens: tokens that came in between. token_ids: those of the first sequence. An engine that fails returns
{"error": "reason"}.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Wave:
    """Response to one request, see the module docstring."""

    first_seconds: float
    total_seconds: float
    later_tokens: int
    token_ids: list[int]


class WaveClock:
    """Clock that notes the times of each sequence's tokens.

    Args:
        num_sequences: sequences of the wave.
    """

    def __init__(self, num_sequences: int) -> None:
        self._times: list[list[float]] = [[] for _ in range(num_sequences)]
        self._began = time.perf_counter()

    def note(self, sequence: int, num_tokens: int = 1) -> None:
        """Note that `num_tokens` tokens of a sequence have arrived."""
        self._times[sequence] += [time.perf_counter()] * num_tokens

    def wave(self, token_ids: Sequence[int]) -> Wave:
        """Return the figures of the finished wave."""
        ended = time.perf_counter()
        first = max(times[0] for times in self._times)
        later = sum(at > first for times in self._times for at in times)
        return Wave(first - self._began, ended - self._began, later, list(token_ids))


def serve(measure: Callable[[Prompts, int], Wave]) -> None:
    """Serve requests until standard input ends. Output of libraries is redirected to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer: dict[str, object] = asdict(measure(asked["prompts"], asked["output_tokens"]))
        except Exception as error:  # every exception of a library is reported in the response
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=answers)
