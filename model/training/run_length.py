"""Length of a run: the steps of its config, or as many steps as fit before a deadline.

A run with a deadline uses the schedule of Hu et al. 2024 (arXiv 2404.06395, section 4). The number of steps can change
during the plateau of the learning rate. The plateau ends when the remaining time is what the decay takes. The number of
steps is then fixed and written to the recipe.
"""

import collections
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from model.training.config import TrainConfig

DECAY_SHARE = 0.2  # of the steps
_WINDOW_SECONDS = 60.0  # window over which the speed is measured
_TOLERANCE = 0.03  # of the steps: a smaller change does not update the config
_WORSE_MEASUREMENTS = 2  # consecutive held-out losses above the best: the model overfits


class Clock:
    """Time spent on a run over all attempts. It is saved periodically, since an attempt may be killed."""

    def __init__(self, path: Path, began: float) -> None:
        """Start the clock. began: the start of this attempt, by `time.monotonic`."""
        self._path = path
        self._began = began
        self._saved_at = began
        try:
            self._earlier = float(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            self._earlier = 0.0

    @property
    def spent(self) -> float:
        """Seconds spent in all attempts."""
        return self._earlier + time.monotonic() - self._began

    def save(self, every: float = 0.0) -> None:
        """Save the time spent, unless the last save was less than `every` seconds ago."""
        now = time.monotonic()
        if now - self._saved_at >= every:
            self._saved_at = now
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(round(self.spent, 1)))
            partial.replace(self._path)


class Pace:
    """Pace of a run without a deadline: measures the speed and keeps the config."""

    after_seconds = 0.0  # estimated time after the last step; 0 if unknown

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._marks: collections.deque[tuple[int, float]] = collections.deque()

    @property
    def spent(self) -> float:
        """Seconds spent so far."""
        return time.monotonic() - self._began

    @property
    def seconds_a_step(self) -> float | None:
        """Recent seconds per step, including the work between steps; None before two steps are done."""
        if len(self._marks) < 2:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return (ended - began) / (last - first)

    def seconds_left(self, step: int, config: TrainConfig) -> float | None:
        """Return the estimated seconds until the run is finished; None before the speed is known."""
        seconds = self.seconds_a_step
        return None if seconds is None else (config.steps - step) * seconds + self.after_seconds

    def after_step(self, step: int, config: TrainConfig, held_out_loss: float | None) -> TrainConfig:
        """Record that `step` steps are done, and return the config to continue with.

        held_out_loss: the loss measured after this step, if any.
        """
        now = time.monotonic()
        self._marks.append((step, now))
        # Keep at least two measurements, even if they are far apart.
        while len(self._marks) > 2 and now - self._marks[1][1] > _WINDOW_SECONDS:
            self._marks.popleft()
        return config


class Deadline(Pace):
    """Pace of a run with a time limit for everything, and a limit on steps set by the size of its text."""

    def __init__(
        self,
        clock: Clock,
        *,
        seconds: float,
        after_seconds: float,
        most_steps: int,
        losses: Mapping[int, float],
        changed: Callable[[TrainConfig], None],
    ) -> None:
        """Start the pace of an attempt.

        losses: held-out losses of earlier attempts, by number of steps done. changed: called with each new config.
        """
        super().__init__()
        self._clock = clock
        self._seconds = seconds
        self.after_seconds = after_seconds
        self._most_steps = most_steps
        self._losses = dict(losses)
        self._changed = changed

    @property
    def spent(self) -> float:
        """Seconds spent so far, in all attempts."""
        return self._clock.spent

    def seconds_left(self, step: int, config: TrainConfig) -> float:
        """Return the estimated seconds until the run is finished; before the speed is known, until the deadline."""
        known = super().seconds_left(step, config)
        return self._seconds - self.spent if known is None else known

    @property
    def learns_by_heart(self) -> bool:
        """True if the most recent held-out losses are above an earlier one: the model overfits."""
        losses = [self._losses[step] for step in sorted(self._losses)]
        before, recent = losses[:-_WORSE_MEASUREMENTS], losses[-_WORSE_MEASUREMENTS:]
        return bool(before) and min(recent) > min(before)

    def after_step(self, step: int, config: TrainConfig, held_out_loss: float | None) -> TrainConfig:
        """Return the config to continue with, as long as time, text size and held-out loss allow."""
        if not self._marks:  # drop losses after the last save: those steps are redone
            self._losses = {done: loss for done, loss in self._losses.items() if done < step}
        super().after_step(step, config, held_out_loss)
        self._clock.save(every=2.0)
        seconds = self.seconds_a_step
        if seconds is None or step > config.steps - config.decay_steps or step < config.warmup_steps:
            return config
        if held_out_loss is not None:
            self._losses[step] = held_out_loss
        possible = int((self._seconds - self.after_seconds - self.spent) / seconds)
        steps = max(step + 1, min(step + possible, self._most_steps))
        if self.learns_by_heart:
            steps = min(steps, _length(step))
        if steps <= _length(step):  # the decay has to start now
            decay = max(1, steps - step)
            steps = step + decay
        elif abs(steps - config.steps) <= _TOLERANCE * config.steps:
            return config
        else:
            decay = int(DECAY_SHARE * steps)
        config = dataclasses.replace(config, steps=steps, decay_steps=decay)
        self._changed(config)
        return config


def _length(step: int) -> int:
    """Return the total steps of a run whose decay begins at `step`."""
    return int(step / (1 - DECAY_SHARE)) + 1
