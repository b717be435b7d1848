"""Picture of docs/performance.md, drawn from docs/results."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from loadtest.measurement.benchmark_program import digest
from loadtest.peers.bench_peers import is_sound


def draw_peers(path: Path, result: Mapping[str, Any]) -> None:
    """Draw decode speed of all compared engines over the number of streams: a panel per model shape and precision."""
    cells = [
        cell for cell in result["cells"] if cell["kind"] == "decode" and any(map(is_sound, cell["peers"].values()))
    ]
    shortest = min((cell["prompt_tokens"] for cell in cells), default=0)
    cells = [cell for cell in cells if cell["prompt_tokens"] == shortest]
    panels = list(dict.fromkeys((cell["shape"], cell["precision"]) for cell in cells))
    columns = max(1, min(3, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(4 * columns, 3.4 * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, panels, strict=False):
        own = [cell for cell in cells if (cell["shape"], cell["precision"]) == panel]
        for number, name in enumerate(("ours", *result["peers"])):
            lines = []
            for cell in own:
                side, names = ("ours", list(cell["peers"])) if name == "ours" else ("theirs", [name])
                sound = [peer for each in names if is_sound(peer := cell["peers"].get(each, {}))]
                if rates := [rate for peer in sound for rate in peer[side]["tokens_per_second"]["values"]]:
                    lines.append((cell["streams"], statistics.median(rates)))
            if lines:
                width = 2.5 if name == "ours" else 1.2
                axes.plot(*zip(*lines, strict=True), "o-", color=f"C{number}", linewidth=width, label=name)
        axes.set_title(" ".join(panel), fontsize=9)
        ticks = sorted({cell["streams"] for cell in own})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, map(str, ticks))
        axes.set_xlabel("streams")
        axes.set_ylabel("tokens/s")
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize=7)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=80, metadata={"Source": digest(result), "Software": None})
