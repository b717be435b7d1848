"""Pictures of docs/performance.md and docs/attention.md, drawn from docs/results."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from loadtest.measurement.benchmark_program import digest
from loadtest.measurement.figures import pooled_deviation
from loadtest.peers.bench_peers import is_sound

_FROM_STEP = 150  # before this training step, all loss curves fall steeply and alike


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
    _save(figure, path, result)


def draw_attention(path: Path, rows: Mapping[str, Any]) -> None:
    """Draw the held-out loss of each attention mechanism: curves over training, and final losses by seed."""
    loss = {name: [run["nats_per_token"] for run in row["runs"]] for name, row in rows.items()}
    noise = pooled_deviation(list(loss.values()))
    ordered = sorted(rows, key=lambda name: statistics.fmean(loss[name]), reverse=True)
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    curves, finals = figure.subplots(1, 2, width_ratios=(1.15, 1))
    baseline = statistics.fmean(loss["multi-head"])
    finals.axvline(baseline, color="grey", linewidth=0.8)
    label = "one standard deviation of seeds"
    finals.axvspan(baseline - noise, baseline + noise, color="grey", alpha=0.2, label=label)
    finals.legend(fontsize=7, loc="upper right")
    for place, name in enumerate(ordered):
        colour = colormaps["tab20"](list(rows).index(name) % 20)
        runs = [dict(map(tuple, run["curve"])) for run in rows[name]["runs"]]
        steps = [step for step in runs[0] if step >= _FROM_STEP and all(step in run for run in runs)]
        means = [statistics.fmean(run[step] for run in runs) for step in steps]
        width, style = 2.6 if name == "multi-head" else 1.2, "-" if place % 2 else "--"
        curves.plot(steps, means, style, color=colour, linewidth=width, label=rows[name]["title"])
        finals.plot(loss[name], [place] * len(loss[name]), "o", color=colour, markersize=4)
        finals.plot([statistics.fmean(loss[name])], [place], "|", color="black", markersize=12)
    curves.set_xlabel("steps")
    curves.set_ylabel("held-out loss on some stories (nats a token), mean of the seeds")
    curves.grid(visible=True, alpha=0.3)
    curves.legend(fontsize=7, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    finals.set_yticks(range(len(ordered)), [rows[name]["title"] for name in ordered], fontsize=8)
    finals.set_xlabel("held-out loss at the end (nats a token)\na dot is a seed, a line their mean")
    finals.grid(visible=True, axis="x", alpha=0.3)
    _save(figure, path, rows, dpi=110)


def _save(figure: Figure, path: Path, result: Mapping[str, Any], dpi: int = 80) -> None:
    figure.savefig(path, dpi=dpi, metadata={"Source": digest(result), "Software": None})
