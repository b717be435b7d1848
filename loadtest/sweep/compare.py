"""Comparison of two sweeps or replays: each figure's change with its interval, and a verdict against a tolerance."""

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from loadtest.measurement.figures import Column, number, table
from loadtest.sweep.figures import METRICS, PERCENTILES

_RATES = ("request_throughput", "output_throughput", "request_goodput")
_SAME_RATE = 0.01  # rates that differ by less than this share are compared
_CONTEXT = ("url", "model_id", "workload", "settings", "slo", "machine")


class Verdict(StrEnum):
    """Result of the comparison of one figure."""

    REGRESSION = "regression"  # worse by more than the tolerance, and the interval excludes no change
    IMPROVEMENT = "improvement"  # the same for the better
    UNCERTAIN = "uncertain"  # beyond the tolerance, but the interval includes no change
    SAME = "within the tolerance"


class Figure(NamedTuple):
    """Figure with its interval; `is_rate`: more is better, as for rates, and unlike for latencies."""

    name: str
    value: float
    low: float
    high: float
    is_rate: bool


def figures_of(sweep: Mapping[str, Any]) -> Iterator[tuple[float | None, Figure]]:
    """Yield the comparable figures of a sweep, each with the rate at which it was measured, or None for the limits."""
    for name, estimate in (sweep["capacity"] or {}).items():
        text, (mean, low, high) = name.replace("_per_second", "/s"), estimate.values()
        yield None, Figure(f"capacity, {text}", mean, low, high, True)
    for key, name in (("stable_rate", "highest stable rate"), ("slo_rate", "highest rate within the objectives")):
        highest, above = sweep[key]["highest"], sweep[key]["lowest_above"]
        if highest is not None:
            yield None, Figure(name, highest, highest, above or highest, True)
    for level in sweep["levels"]:
        keys = {f"p{percentile:g}_{metric}_ms": False for metric in METRICS for percentile in PERCENTILES}
        for key, is_rate in (dict.fromkeys(_RATES, True) | keys).items():
            if level[key] is not None:
                name = key.replace("e2el", "e2e").replace("_", " ").removesuffix(" ms")
                low, high = level["intervals"][key]
                yield level["rate"], Figure(name, level[key], low, high, is_rate)


def compare(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float) -> list[dict[str, Any]]:
    """Return a row for each figure that both sweeps have: limits, and figures of levels with equal rates."""
    rows = []
    for rate, old in figures_of(before):
        for other_rate, new in figures_of(after):
            if old.name != new.name or (rate is None) != (other_rate is None) or not old.value:
                continue
            if rate is not None and other_rate is not None and abs(other_rate / rate - 1) > _SAME_RATE:
                continue
            change = new.value / old.value - 1
            # Of the difference: a ratio's own interval says nothing where the old figure is uncertain and small.
            margin = math.hypot(*((each.high - each.low) / 2 for each in (old, new))) / old.value
            is_worse = (change < 0) == old.is_rate
            verdict = Verdict.SAME
            if abs(change) > tolerance:
                certain = Verdict.REGRESSION if is_worse else Verdict.IMPROVEMENT
                verdict = certain if abs(change) > margin else Verdict.UNCERTAIN
            at = "" if rate is None else f" at {number(rate)} requests/s"
            changed = f"{change:+.1%} ± {margin:.1%}"
            rows.append({"figure": old.name + at, "before": number(old.value), "after": number(new.value),
                         "change": changed, "verdict": verdict})  # fmt: skip
    return rows


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the settings in which two sweeps differ, a line each: their figures may differ for this reason."""
    return [
        f"{name}: {before.get(name)} / {after.get(name)}" for name in _CONTEXT if before.get(name) != after.get(name)
    ]


def comparison_text(before: Mapping[str, Any], after: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the comparison as Markdown."""
    heads = ("figure", "before", "after", "change", "verdict")
    notes = [f"- differs: {line}" for line in differences(before, after)]
    return "\n".join([table([Column(head, head) for head in heads], rows), *notes])
