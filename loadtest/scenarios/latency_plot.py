"""Picture of bench_latency: slowdown of the streams by a long prompt, over the prompt's TTFT."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.measurement.provenance import digest

_DPI = 80
# Aim: maximum ratio of the streams' ITL p99 during an arrival to that before.
MOST_RATIO = 2.0


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """Draw the ratio of the streams' gaps to those before, over the prompt's TTFT: a point per limit."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    points = result["long"]["points"]
    by_budget = [point for point in points if point["prompt_slowdown"] is None]
    by_slowdown = [point for point in points if point["prompt_slowdown"] is not None]
    _line(axes, by_budget, "max_batched_tokens", "--max-batched-tokens alone", "C0")
    _line(axes, by_slowdown, "prompt_slowdown", "--prompt-slowdown", "C1")
    axes.axhline(MOST_RATIO, color="black", linestyle=":", linewidth=1)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(left=0)
    axes.set_xlabel(f"ms to the first token of a prompt of {result['long']['prompt_tokens']:,}")
    axes.set_ylabel(f"ITL p99 of {result['long']['streams']} others, ratio (dotted: {MOST_RATIO:g})")
    axes.grid(visible=True, alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=_DPI, metadata={"Source": digest(result), "Software": None})


def _line(axes: Axes, points: Sequence[Mapping[str, Any]], name: str, label: str, color: str) -> None:
    """Draw medians with their spread, each labelled with its limit."""
    times, ratios = ([point[figure] for point in points] for figure in ("ttft_ms", "itl_p99_ratio"))
    x, y = ([each["median"] for each in figures] for figures in (times, ratios))
    below = [each["median"] - each["min"] for each in ratios]
    above = [each["max"] - each["median"] for each in ratios]
    axes.errorbar(x, y, [below, above], fmt="o-", color=color, capsize=3, label=label)
    for point, at in zip(points, zip(x, y, strict=True), strict=True):
        axes.annotate(f"{point[name]:g}", at, xytext=(6, 4), textcoords="offset points", fontsize=8)
