"""Progress of a run: its recent speed, and a line every 10 s."""

import collections
import time
from collections.abc import Callable

from model.training.config import TrainConfig

_LINE_SECONDS = 10.0
_SMOOTHING = 20  # steps
_WINDOW_SECONDS = 60.0  # window over which the speed is measured


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


class Progress:
    """Reports of loss, tokens/s, time spent and time left, every 10 s and at the last step."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._loss: float | None = None
        self._held_out = ""
        self._reported_at = -_LINE_SECONDS

    def update(
        self, config: TrainConfig, step: int, loss: float, held_out: float | None, spent: float, seconds: float | None
    ) -> None:
        """Record a finished step, and report it if the last report is 10 s old.

        held_out: held-out loss, None if not measured. spent: seconds of training. seconds: per step, None if unknown.
        """
        self._loss = loss if self._loss is None else self._loss + (loss - self._loss) / _SMOOTHING
        if held_out is not None:
            self._held_out = f" (held out {held_out:.2f})"
        if step < config.steps and time.monotonic() - self._reported_at < _LINE_SECONDS:
            return
        self._reported_at = time.monotonic()
        parts = (
            "time left unknown" if seconds is None else f"{duration((config.steps - step) * seconds)} left",
            f"{duration(spent)} spent",
            f"loss {self._loss:.2f}{self._held_out}",
            *([] if seconds is None else [f"{config.tokens_per_step / seconds:,.0f} tokens/s"]),
            f"step {step:,}/{config.steps:,}",
        )
        self._report(", ".join(parts))


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss, or as m:ss below one hour."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
