"""When places come free: what each answer that holds one has left, at the pace of late, and how many end before.

An answer ends at its length at the latest. Before that it ends, by a stop or a client that leaves, with a chance that
is the same at any time, and as great as answers' endings of late say, by the rule of succession: one more is counted
than were seen. So `k` of them have ended when the j-th shortest has come to its length and `k - j` others have ended
early, for whichever j that is first.
"""

import math
from collections.abc import Hashable
from typing import Protocol

from service.rates import Rate


class Answer(Hashable, Protocol):
    """One that holds a place."""

    @property
    def num_remaining_tokens(self) -> int:
        """How many it may still get."""
        ...


class Places:
    """The answers that hold places."""

    def __init__(self) -> None:
        self._answers: dict[Answer, None] = {}
        self._pace = Rate()  # tokens of each answer
        self._early = Rate()  # endings before the length, of each answer
        self._step_seconds = 0.0  # since the last step
        self._remaining: list[int] | None = None  # ascending; None when it has to be looked up

    @property
    def num_seen(self) -> int:
        """How many endings can be foreseen: later ones are more and more those of answers that have not begun."""
        return len(self._answers) // 2 if self._pace.is_known else 0

    def take(self, answer: Answer) -> None:
        """It has begun."""
        self._answers[answer] = None
        self._remaining = None

    def leave(self, answer: Answer) -> None:
        """It has ended, if it had begun."""
        if answer not in self._answers:
            return
        if answer.num_remaining_tokens:
            self._early.add(1 / len(self._answers), 0.0)
        del self._answers[answer]
        self._remaining = None

    def pass_time(self, seconds: float) -> None:
        """So long have these answers been computed, since the last call."""
        if self._answers:
            self._step_seconds += seconds
            self._early.add(0.0, seconds)

    def step(self, num_tokens_each: float) -> None:
        """Each has got so many tokens more."""
        self._pace.add(num_tokens_each, self._step_seconds)
        self._step_seconds = 0.0
        self._remaining = None

    def seconds_for_tokens(self, num_tokens: float) -> float:
        """How long an answer takes for so many."""
        return self._pace.seconds_for(num_tokens)

    def seconds_until_ended(self, count: float) -> float:
        """When so many of them, at most `num_seen`, will have ended: seconds from now."""
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
