"""Pictures of docs/performance.md: step time against the roofline, and tokens/s of each engine."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.measurement.provenance import digest
from loadtest.peers.comparison_cells import is_sound

_DPI = 80


def draw_engine(path: Path, result: Mapping[str, Any]) -> None:
    """Draw step time over the number of sequences, a line per context, and the roofline below each."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    points, machine = result["decode"], result["roofline"]
    reads, computes = (1e6 * machine[name]["median"] for name in ("gb_per_second", "gflops"))  # per millisecond
    for number, context in enumerate(dict.fromkeys(point["context_length"] for point in points)):
        own = sorted((p for p in points if p["context_length"] == context), key=lambda point: point["batch_size"])
        sizes = [point["batch_size"] for point in own]
        steps = [point["step_ms"]["median"] for point in own]
        bounds = [max(point["bytes"] / reads, point["flops"] / computes) for point in own]
        axes.plot(sizes, steps, "o-", color=f"C{number}", label=f"context {context}")
        axes.plot(sizes, bounds, ":", color=f"C{number}")
    _logarithmic(axes, sorted({point["batch_size"] for point in points}), "sequences", "ms a step (dotted: roofline)")
    axes.legend(fontsize=8)
    _save(figure, path, result)


def draw_peers(path: Path, result: Mapping[str, Any]) -> None:
    """Draw tokens/s over streams at the short context: a panel per shape and precision, a line per engine."""
    cells = [cell for cell in result["cells"] if cell["kind"] == "decode" and _measured(cell)]
    shortest = min((cell["prompt_tokens"] for cell in cells), default=0)
    cells = [cell for cell in cells if cell["prompt_tokens"] == shortest]
    panels = list(dict.fromkeys((cell["shape"], cell["precision"]) for cell in cells))
    columns = max(1, min(3, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(4 * columns, 3.4 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    names = ["ours", *result["peers"]]
    for axes, panel in zip(grid, panels, strict=False):
        own = [cell for cell in cells if (cell["shape"], cell["precision"]) == panel]
        for number, name in enumerate(names):
            lines = [(cell["streams"], rate) for cell in own if (rate := _rate(cell, name)) is not None]
            if lines:
                width = 2.5 if name == "ours" else 1.2
                axes.plot(*zip(*lines, strict=True), "o-", color=f"C{number}", linewidth=width, label=name)
        _logarithmic(axes, sorted({cell["streams"] for cell in own}), "streams", "tokens/s")
        axes.set_title(" ".join(panel), fontsize=9)
        axes.legend(fontsize=7)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    _save(figure, path, result)


def _measured(cell: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [figure for figure in cell["peers"].values() if is_sound(figure)]


def _rate(cell: Mapping[str, Any], name: str) -> float | None:
    if name == "ours":
        values = [value for figure in _measured(cell) for value in figure["ours"]["tokens_per_second"]["values"]]
        return float(statistics.median(values))
    figure = cell["peers"].get(name, {})
    return float(figure["theirs"]["tokens_per_second"]["median"]) if figure and is_sound(figure) else None


def _logarithmic(axes: Axes, ticks: Sequence[int], x_label: str, y_label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, which="both", alpha=0.25)


def _save(figure: Figure, path: Path, result: Mapping[str, Any]) -> None:
    figure.savefig(path, dpi=_DPI, metadata={"Source": digest(result), "Software": None})
