"""Figures of a load over time: endings, tokens, TTFT and ITL in intervals of equal length."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.client.outcome import ClientKind, Ending, Outcome
from loadtest.measurement.figures import percentiles

_MAX_INTERVALS = 60  # of the timeline of a finished load
_NAMES = {Ending.OK: "ok", Ending.SHED: "rejected", Ending.CANCELLED: "cancelled"}
ENDINGS = (*_NAMES.values(), "failed")
PERCENTILES = (50, 99)


@dataclass(slots=True)
class _Interval:
    """Requests that ended, and chunks that arrived, in one interval. `row` has their figures; None after a change."""

    endings: Counter[str] = field(default_factory=Counter)
    num_tokens: float = 0.0
    ttft_ms: "array[float]" = field(default_factory=lambda: array("d"))
    itl_ms: "array[float]" = field(default_factory=lambda: array("d"))
    row: dict[str, float | None] | None = None

    def figures(self, length_seconds: float) -> dict[str, float | None]:
        """Return requests/s by ending, tokens/s, and percentiles of TTFT and ITL; None where nothing arrived."""
        row: dict[str, float | None] = {name: self.endings[name] / length_seconds for name in ENDINGS}
        row["tokens"] = self.num_tokens / length_seconds
        for name, values in (("ttft", self.ttft_ms), ("itl", self.itl_ms)):
            row |= {f"{share}_{name}_ms": value for share, value in percentiles(values, PERCENTILES).items()}
        return row


class Timeline:
    """Timeline to which requests are added when they end. Their chunks count in the intervals of their arrival."""

    def __init__(self, began_seconds: float, interval_seconds: float) -> None:
        self._began_seconds = began_seconds
        self._interval_seconds = interval_seconds
        self._intervals: defaultdict[int, _Interval] = defaultdict(_Interval)

    def add(self, outcome: Outcome) -> None:
        """Add a request that has ended."""
        self._at(outcome.end_seconds).endings[_NAMES.get(outcome.ending, "failed")] += 1
        moments = outcome.chunk_seconds
        for number, moment in enumerate(moments):
            interval = self._at(moment)
            interval.num_tokens += outcome.completion_tokens / len(moments)
            if outcome.client is ClientKind.SLOW:
                continue
            if number:
                interval.itl_ms.append(1e3 * (moment - moments[number - 1]))
            else:
                interval.ttft_ms.append(1e3 * (moment - outcome.intended_seconds))
        if not moments and outcome.ending is Ending.OK:  # not streamed: all tokens arrive at the end
            self._at(outcome.end_seconds).num_tokens += outcome.completion_tokens

    def rows(self, *, until_seconds: float = 0.0) -> list[dict[str, Any]]:
        """Return the figures of the last intervals, each with its begin in seconds from the load's beginning.

        until_seconds: time until which there are intervals, even if nothing happens any more.
        """
        if until_seconds > self._began_seconds:
            self._at(until_seconds)
        count, rows = max(self._intervals, default=-1) + 1, []
        for number in range(max(0, count - _MAX_INTERVALS), count):
            interval = self._intervals[number]
            interval.row = interval.row or interval.figures(self._interval_seconds)
            rows.append({"seconds": number * self._interval_seconds, **interval.row})
        return rows

    def _at(self, seconds: float) -> _Interval:
        interval = self._intervals[max(0, int((seconds - self._began_seconds) / self._interval_seconds))]
        interval.row = None
        return interval


def timeline(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the figures of a finished load over time, in about 10 to 60 intervals, from first send to last end."""
    began = min((outcome.intended_seconds for outcome in outcomes), default=0.0)
    seconds = max([0.01, *(outcome.end_seconds - began for outcome in outcomes)])
    # The factor keeps the last end within the last interval.
    whole = Timeline(began, seconds / max(10, min(_MAX_INTERVALS, int(seconds))) * (1 + 1e-9))
    for outcome in outcomes:
        whole.add(outcome)
    return whole.rows()
