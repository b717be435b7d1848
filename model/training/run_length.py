"""Speed of a run, and the number of steps that fit before a deadline."""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence

from model.training.config import TrainConfig

DECAY_SHARE = 0.2  # of the steps
_WINDOW_SECONDS = 60.0  # window over which the speed is measured
_TOLERANCE = 0.03  # of the steps: a smaller change does not update the config
_WORSE_MEASUREMENTS = 2  # consecutive held-out losses above the best: the model overfits


class Pace:
    """Recent speed of a run, including the work between steps."""

    def __init__(self) -> None:
        self._marks: collections.deque[tuple[int, float]] = collections.deque()

    def record(self, step: int) -> None:
        """Record that `step` steps are done."""
        now = time.monotonic()
        self._marks.append((step, now))
        # Keep at least two measurements, even if they are far apart.
        while len(self._marks) > 2 and now - self._marks[1][1] > _WINDOW_SECONDS:
            self._marks.popleft()

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the window; None before two steps are recorded."""
        if len(self._marks) < 2:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return (ended - began) / (last - first)


class Deadline:
    """Time limit of a run, and a limit on steps set by the size of its text.

    The number of steps can change on the plateau of the learning rate (Hu et al. 2024, arXiv 2404.06395, section 4).
    The plateau ends when the remaining time is what the decay takes, or when the model overfits. The number of steps is
    then fixed.
    """

    def __init__(
        self, *, at: float, after_seconds: float, most_steps: int, changed: Callable[[TrainConfig], None]
    ) -> None:
        """Set the limits.

        at: the time limit, as `time.monotonic`. after_seconds: time needed after the last step. changed: called with
        each new config.
        """
        self._at = at
        self.after_seconds = after_seconds
        self._most_steps = most_steps
        self._changed = changed
        self.is_overfitting = False

    def next_config(self, step: int, config: TrainConfig, pace: Pace, held_out: Sequence[float]) -> TrainConfig:
        """Return the config to continue with after `step` steps. held_out: all held-out losses so far."""
        seconds = pace.seconds_per_step
        if seconds is None or step > config.steps - config.decay_steps or step < config.warmup_steps:
            return config
        before, recent = held_out[:-_WORSE_MEASUREMENTS], held_out[-_WORSE_MEASUREMENTS:]
        self.is_overfitting = bool(before) and min(recent) > min(before)
        possible = int((self._at - self.after_seconds - time.monotonic()) / seconds)
        steps = max(step + 1, min(step + possible, self._most_steps))
        steps_if_decaying_now = int(step / (1 - DECAY_SHARE)) + 1
        if self.is_overfitting:
            steps = min(steps, steps_if_decaying_now)
        if steps <= steps_if_decaying_now:
            decay = steps - step
        elif abs(steps - config.steps) <= _TOLERANCE * config.steps:
            return config
        else:
            decay = int(DECAY_SHARE * steps)
        config = dataclasses.replace(config, steps=steps, decay_steps=decay)
        self._changed(config)
        return config
