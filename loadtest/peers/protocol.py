"""What a driver is asked and what it answers: JSON lines. Imports nothing but the standard library.

    driver   {"ready": true}
    asked    {"prompts": [[5, 17, ...], ...], "output_tokens": 128}
    driver   {"first_seconds": 0.05, "total_seconds": 0.71, "later_tokens": 2032, "token_ids": [8, 3, ...]}

Every prompt is to be continued greedily by exactly so many tokens, ends of text ignored.
first_seconds: until the last of the sequences had its first token. total_seconds: until all were done. later_tokens:
tokens that came in between. token_ids: the first sequence's. An engine that cannot do it answers {"error": "why"}.
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
    """One answer, see above."""

    first_seconds: float
    total_seconds: float
    later_tokens: int
    token_ids: list[int]


class WaveClock:
    """Notes when each sequence's tokens come.

    Args:
        num_sequences: of the wave.
    """

    def __init__(self, num_sequences: int) -> None:
        self._times: list[list[float]] = [[] for _ in range(num_sequences)]
        self._began = time.perf_counter()

    def note(self, sequence: int, num_tokens: int = 1) -> None:
        """So many tokens of a sequence are here."""
        self._times[sequence] += [time.perf_counter()] * num_tokens

    def wave(self, token_ids: Sequence[int]) -> Wave:
        """All that was noted, when all is done."""
        ended = time.perf_counter()
        first = max(times[0] for times in self._times)
        later = sum(at > first for times in self._times for at in times)
        return Wave(first - self._began, ended - self._began, later, list(token_ids))


def serve(measure: Callable[[Prompts, int], Wave]) -> None:
    """Answer until standard input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer: dict[str, object] = asdict(measure(asked["prompts"], asked["output_tokens"]))
        except Exception as error:  # whatever a library raises is the answer's to say
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=answers)
