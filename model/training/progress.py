"""How a run shows itself: a live bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

_LINE_SECONDS = 30.0


class Progress:
    """Loss, tokens/s and time left, as a context manager around the loop."""

    def __init__(self, steps: int, step: int, tokens_per_step: int, report: Callable[[str], None]) -> None:
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._report = report
        self._loss: float | None = None
        self._seconds: float | None = None
        self._held_out = ""
        self._said_at = -_LINE_SECONDS
        columns = (
            TextColumn("[bold]train"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._bar = RichProgress(*columns, speed_estimate_period=300) if sys.stdout.isatty() else None
        self._task = self._bar.add_task("", total=steps, completed=step) if self._bar else None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, step: int, loss: float, seconds: float, held_out_loss: float | None) -> None:
        """One more step is done: its loss, its duration, and the held-out loss if it was measured."""
        self._loss = loss if self._loss is None else self._loss + (loss - self._loss) / 20
        self._seconds = seconds if self._seconds is None else self._seconds + (seconds - self._seconds) / 20
        if held_out_loss is not None:
            self._held_out = f", held out {held_out_loss:.3f}"
        tokens = self._tokens_per_step / self._seconds
        text = f"loss {self._loss:.3f}{self._held_out}, {tokens:,.0f} tokens/s"
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif held_out_loss is not None or step == self._steps or time.monotonic() - self._said_at > _LINE_SECONDS:
            self._said_at = time.monotonic()
            minutes = (self._steps - step) * self._seconds / 60
            self._report(f"step {step:,}/{self._steps:,}: {text}, {minutes:.1f} min left")
