"""Progress of a run: a live bar on a terminal, a line every 30 s elsewhere."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from model.training.config import TrainConfig
from model.training.run_length import Pace

_LINE_SECONDS = 30.0
_SMOOTHING = 20  # steps


class Progress:
    """Context manager that displays loss, tokens/s, time spent and time left."""

    def __init__(self, config: TrainConfig, step: int, pace: Pace, report: Callable[[str], None]) -> None:
        self._pace = pace
        self._report = report
        self._loss: float | None = None
        self._seconds = 0.0
        self._steps = 0
        self._held_out = ""
        self._said_at = -_LINE_SECONDS
        columns = (
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8)),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        )
        self._bar = RichProgress(*columns, expand=True, refresh_per_second=4) if sys.stdout.isatty() else None
        waiting = f"step {step:,}/{config.steps:,}, the first step takes longest"
        self._task = self._bar.add_task(waiting, total=config.steps, completed=step) if self._bar else None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, config: TrainConfig, step: int, loss: float, seconds: float, held_out_loss: float | None) -> None:
        """Show a finished step. held_out_loss: None if it was not measured after this step."""
        self._loss = loss if self._loss is None else self._loss + (loss - self._loss) / _SMOOTHING
        self._steps += 1
        # The first step may include compilation: the average starts at the second step.
        share = 1 / _SMOOTHING if self._steps > 2 else 1.0
        self._seconds += (seconds - self._seconds) * share
        if held_out_loss is not None:
            self._held_out = f" (held out {held_out_loss:.2f})"
        left = self._pace.seconds_left(step, config)
        # The most important part is first, since a narrow terminal cuts the line.
        parts = (
            "time left unknown" if left is None else f"{duration(left)} left",
            f"{duration(self._pace.spent)} spent",
            f"loss {self._loss:.2f}{self._held_out}",
            f"{config.tokens_per_step / self._seconds:,.0f} tokens/s",
            f"step {step:,}/{config.steps:,}",
        )
        text = ", ".join(parts)
        if self._bar and self._task is not None:
            self._bar.update(self._task, total=config.steps, completed=step, description=text)
        elif step >= config.steps or time.monotonic() - self._said_at > _LINE_SECONDS:
            self._said_at = time.monotonic()
            self._report(text)


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss, or as m:ss below one hour."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
