"""Picture of docs/attention.md: held-out loss during training, and at the end."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.inprocess.attention_mechanisms import BASELINE
from loadtest.inprocess.seed_noise import losses, mean_loss, seed_spread
from loadtest.measurement.provenance import digest

_FROM_STEP = 150  # before this step, all curves fall steeply and alike


def draw(path: Path, training: Mapping[str, Any]) -> None:
    """Write the picture as PNG."""
    rows = training["rows"]
    ordered = sorted(rows, key=lambda name: mean_loss(rows[name]))
    palette = colormaps["tab20"]
    colours = {name: palette(index % 20) for index, name in enumerate(rows)}
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    curves, finals = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_curves(curves, rows, ordered, colours)
    _draw_finals(finals, rows, ordered, colours)
    figure.savefig(path, dpi=110, metadata={"Source": digest(training["rows"]), "Software": None})


def _draw_curves(axes: Axes, rows: Mapping[str, Any], ordered: list[str], colours: Mapping[str, Any]) -> None:
    for place, name in enumerate(reversed(ordered)):  # legend order: highest curve first
        runs = [dict(map(tuple, run["curve"])) for run in rows[name]["runs"]]
        steps = [step for step in runs[0] if step >= _FROM_STEP and all(step in run for run in runs)]
        means = [statistics.fmean(run[step] for run in runs) for step in steps]
        width = 2.6 if name == BASELINE else 1.2
        style = "-" if place % 2 else "--"
        axes.plot(steps, means, style, color=colours[name], linewidth=width, label=rows[name]["title"])
    axes.set_xlabel("steps")
    axes.set_ylabel("held-out loss on some stories (nats a token), mean of the seeds")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _draw_finals(axes: Axes, rows: Mapping[str, Any], ordered: list[str], colours: Mapping[str, Any]) -> None:
    baseline, spread = mean_loss(rows[BASELINE]), seed_spread(rows)
    axes.axvline(baseline, color="grey", linewidth=0.8)
    if spread is not None:
        axes.axvspan(
            baseline - spread, baseline + spread, color="grey", alpha=0.2, label="one standard deviation of seeds"
        )
        axes.legend(fontsize=7, loc="upper right")
    for place, name in enumerate(reversed(ordered)):
        values = list(losses(rows[name]).values())
        axes.plot(values, [place] * len(values), "o", color=colours[name], markersize=4)
        axes.plot([mean_loss(rows[name])], [place], "|", color="black", markersize=12)
    axes.set_yticks(range(len(ordered)), [rows[name]["title"] for name in reversed(ordered)], fontsize=8)
    axes.set_xlabel("held-out loss at the end (nats a token)\na dot is a seed, a line their mean")
    axes.grid(visible=True, axis="x", alpha=0.3)
