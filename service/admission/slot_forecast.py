"""Prediction of when running sequences end and free their slots.

A sequence ends at its maximum length at the latest. Earlier endings (stop token, stop string, client disconnect) are
modelled as a constant hazard rate. The rate is estimated from recent early endings with add-one smoothing (Laplace's
rule of succession).

For any j, `k` sequences have ended once the j-th shortest has reached its maximum length and `k - j` further sequences
have ended early. The prediction is the minimum over j.
"""

import math
from collections.abc import Hashable
from typing import Protocol

from service.admission.rate_estimator import Rate


class RunningResponse(Hashable, Protocol):
    """Running sequence that holds a slot."""

    @property
    def num_remaining_tokens(self) -> int:
        """Return how many more tokens the sequence may generate."""
        ...


class SlotForecast:
    """Running sequences, their token rate and their rate of early endings."""

    def __init__(self) -> None:
        self._answers: dict[RunningResponse, None] = {}
        self._pace = Rate()  # tokens of each sequence
        self._early = Rate()  # early endings, as a fraction of the running sequences
        self._step_seconds = 0.0  # compute time since the last step
        self._remaining: list[int] | None = None  # tokens left, ascending; None: to be recomputed

    @property
    def num_seen(self) -> int:
        """Return how many endings can be predicted: half of the running sequences, or 0 while the rate is unknown.

        Later endings depend more and more on sequences that have not started.
        """
        return len(self._answers) // 2 if self._pace.is_known else 0

    def take(self, answer: RunningResponse) -> None:
        """Add a sequence that has started."""
        self._answers[answer] = None
        self._remaining = None

    def leave(self, answer: RunningResponse) -> None:
        """Remove a sequence that has ended. Ignore a sequence that never started."""
        if answer not in self._answers:
            return
        if answer.num_remaining_tokens:
            self._early.add(1 / len(self._answers), 0.0)
        del self._answers[answer]
        self._remaining = None

    def pass_time(self, seconds: float) -> None:
        """Record compute time of the running sequences since the last call."""
        if self._answers:
            self._step_seconds += seconds
            self._early.add(0.0, seconds)

    def step(self, num_tokens_each: float) -> None:
        """Record a step that gave each sequence `num_tokens_each` tokens on average."""
        self._pace.add(num_tokens_each, self._step_seconds)
        self._step_seconds = 0.0
        self._remaining = None

    def seconds_for_tokens(self, num_tokens: float) -> float:
        """Return the time in which one sequence generates `num_tokens`."""
        return self._pace.seconds_for(num_tokens)

    def seconds_until_ended(self, count: float) -> float:
        """Return the predicted seconds until `count` sequences, at most `num_seen`, have ended."""
        if count <= 0:
            return 0.0
        if self._remaining is None:
            self._remaining = sorted(answer.num_remaining_tokens for answer in self._answers)
        since_step = min(self._step_seconds, self._pace.seconds_for(1.0))
        earliest = math.inf
        for num_long in range(math.ceil(count) + 1):
            by_length = self._pace.seconds_for(self._remaining[num_long - 1]) - since_step if num_long else 0.0
            if by_length >= earliest:
                break
            earliest = min(earliest, max(by_length, self._seconds_until_early(count - num_long)))
        return max(0.0, earliest)

    def _seconds_until_early(self, count: float) -> float:
        num_answers = len(self._answers)
        return self._early.seconds_for(count / num_answers, prior=1 / num_answers) if count > 0 else 0.0
