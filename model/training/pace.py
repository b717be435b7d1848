"""How long a run will be: as many steps as its config says, or as many as fit before a deadline.

A run with a deadline uses its schedule as Hu et al. 2024 do (arXiv 2404.06395, section 4): while the learning rate is
on its plateau any length is still open, so the plateau lasts until the rest of the time is what the decay takes. From
there on the number of steps is fixed, and the finished run is the one that its recipe describes.
"""

import collections
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from model.training.config import TrainConfig

DECAY_SHARE = 0.2  # of the steps
_WINDOW_SECONDS = 60.0  # in which the speed is measured
_TOLERANCE = 0.03  # of the steps: a smaller change of plan is not worth a word
_WORSE_MEASUREMENTS = 2  # of the held-out loss, in a row: from then on a text is learned by heart


class Clock:
    """The seconds a run has taken, of earlier attempts too: saved now and then, for an attempt may be killed."""

    def __init__(self, path: Path, began: float) -> None:
        """`began`: when this attempt did, by `time.monotonic`."""
        self._path = path
        self._began = began
        self._saved_at = began
        try:
            self._earlier = float(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            self._earlier = 0.0

    @property
    def spent(self) -> float:
        """Seconds of all attempts together."""
        return self._earlier + time.monotonic() - self._began

    def save(self, every: float = 0.0) -> None:
        """Write them down, unless that was less than `every` seconds ago."""
        now = time.monotonic()
        if now - self._saved_at >= every:
            self._saved_at = now
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(round(self.spent, 1)))
            partial.replace(self._path)


class Pace:
    """The pace of a run without a deadline: its config stands, and its speed is watched."""

    after_seconds = 0.0  # what comes after the last step, as far as it is known

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._marks: collections.deque[tuple[int, float]] = collections.deque()

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began

    @property
    def seconds_a_step(self) -> float | None:
        """Of late, with all that goes on between steps; None before two steps are done."""
        if len(self._marks) < 2:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return (ended - began) / (last - first)

    def seconds_left(self, step: int, config: TrainConfig) -> float | None:
        """Until everything is finished; None before it can be told."""
        seconds = self.seconds_a_step
        return None if seconds is None else (config.steps - step) * seconds + self.after_seconds

    def after_step(self, step: int, config: TrainConfig, held_out_loss: float | None) -> TrainConfig:
        """`step` steps are done: the config to go on with. `held_out_loss`: where it was measured after this step."""
        now = time.monotonic()
        self._marks.append((step, now))
        # The first steps wait for the compiler; at least two marks are kept, however far apart.
        while len(self._marks) > 2 and now - self._marks[1][1] > _WINDOW_SECONDS:
            self._marks.popleft()
        return config


class Deadline(Pace):
    """The pace of a run that has so many seconds for everything, and a text that bears so many steps."""

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
        """`losses`: held-out losses that earlier attempts have measured, by the number of steps that were done.
        `changed`: is told of each new config."""
        super().__init__()
        self._clock = clock
        self._seconds = seconds
        self.after_seconds = after_seconds
        self._most_steps = most_steps
        self._losses = dict(losses)
        self._changed = changed

    @property
    def spent(self) -> float:
        """Seconds so far, of all attempts."""
        return self._clock.spent

    def seconds_left(self, step: int, config: TrainConfig) -> float:
        """Until everything is finished: before the speed is known, until the deadline."""
        known = super().seconds_left(step, config)
        return self._seconds - self.spent if known is None else known

    @property
    def learns_by_heart(self) -> bool:
        """Whether the held-out loss rises."""
        losses = [self._losses[step] for step in sorted(self._losses)]
        before, recent = losses[:-_WORSE_MEASUREMENTS], losses[-_WORSE_MEASUREMENTS:]
        return bool(before) and min(recent) > min(before)

    def after_step(self, step: int, config: TrainConfig, held_out_loss: float | None) -> TrainConfig:
        """The config to go on with: as long as time, text and held-out loss allow."""
        if not self._marks:  # what an earlier attempt has seen beyond its last save is seen again
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
        if steps <= _length(step):  # now or never
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
    """Steps of a run whose decay begins at this one."""
    return int(step / (1 - DECAY_SHARE)) + 1
