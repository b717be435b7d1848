"""Pictures of docs/performance.md and docs/attention.md, drawn from docs/results."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.measurement.benchmark_program import digest
from loadtest.measurement.figures import pooled_deviation
from loadtest.peers.bench_peers import is_sound

_MAX_ITL_RATIO = 2.0  # target for the streams' ITL p99 while a prompt arrives, relative to the ITL before
_FROM_STEP = 150  # before this training step, all loss curves fall steeply and alike


def draw_engine(path: Path, result: Mapping[str, Any]) -> None:
    """Draw the engine's step time over batch size: a line per context length, and its roofline dotted below."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    points, machine = result["decode"], result["roofline"]
    reads, computes = (1e6 * machine[name]["median"] for name in ("gb_per_second", "gflops"))  # per millisecond
    for number, context in enumerate(dict.fromkeys(point["context_length"] for point in points)):
        own = sorted((p for p in points if p["context_length"] == context), key=lambda point: point["batch_size"])
        sizes = [point["batch_size"] for point in own]
        bounds = [max(point["bytes"] / reads, point["flops"] / computes) for point in own]
        steps = [point["step_ms"]["median"] for point in own]
        axes.plot(sizes, steps, "o-", color=f"C{number}", label=f"context {context}")
        axes.plot(sizes, bounds, ":", color=f"C{number}")
    ticks = sorted({point["batch_size"] for point in points})
    _finish(axes, "sequences", "ms a step (dotted: roofline)", ticks)
    _save(figure, path, result)


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
        _finish(axes, "streams", "tokens/s", sorted({cell["streams"] for cell in own}))
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    _save(figure, path, result)


def draw_latency(path: Path, result: Mapping[str, Any]) -> None:
    """Plot the factor by which a long prompt raises other streams' ITL p99 against the prompt's TTFT, by flag value."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, label) in enumerate(
        (("max_batched_tokens", "--max-batched-tokens alone"), ("prompt_slowdown", "--prompt-slowdown"))
    ):
        points = [p for p in result["long"]["points"] if (p["prompt_slowdown"] is None) == (number == 0)]
        ratios = [point["itl_p99_ratio"] for point in points]
        x, y = [point["ttft_ms"]["median"] for point in points], [ratio["median"] for ratio in ratios]
        errors = [[abs(ratio["median"] - ratio[end]) for ratio in ratios] for end in ("min", "max")]
        axes.errorbar(x, y, errors, fmt="o-", color=f"C{number}", capsize=3, label=label)
        for point, at in zip(points, zip(x, y, strict=True), strict=True):
            axes.annotate(f"{point[name]:g}", at, xytext=(6, 4), textcoords="offset points", fontsize=8)
    axes.axhline(_MAX_ITL_RATIO, color="black", linestyle=":", linewidth=1)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(left=0)
    axes.set_xlabel(f"ms to the first token of a prompt of {result['long']['prompt_tokens']:,}")
    axes.set_ylabel(f"ITL p99 of {result['long']['streams']} others, ratio (dotted: {_MAX_ITL_RATIO:g})")
    axes.grid(visible=True, alpha=0.25)
    axes.legend(fontsize=8)
    _save(figure, path, result)


def draw_scaling(path: Path, result: Mapping[str, Any]) -> None:
    """Draw step time, KV-cache memory, TTFT and start-up time, each over its size, with the fitted power laws."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    (steps, memory), (prefix, start) = figure.subplots(2, 2)
    for name, key in (("batch", "batch_size"), ("context", "context_length")):
        _draw_law(steps, result["steps"][f"over_{name}"], key, lambda point: point["step_ms"]["median"], name)
    _finish(steps, "sequences, or tokens of each", "ms a step")
    _draw_law(memory, result["kv_memory"], "tokens", lambda point: point["bytes"] / 1e6, "resident", scale=1e-6)
    tokens = [point["tokens"] for point in result["kv_memory"]["points"]]
    each = result["kv_memory"]["bytes_per_token"] / 1e6
    memory.plot(tokens, [count * each for count in tokens], ":", color="black", label="formula")
    _finish(memory, "tokens", "MB of KV-cache")
    _draw_law(prefix, result["prefixes"], "rest_tokens", lambda point: point["ttft_ms"]["median"], "cached prefix")
    alone = [(point["rest_tokens"], point["rest_alone_ms"]["median"]) for point in result["prefixes"]["points"]]
    prefix.plot(*zip(*alone, strict=True), "x", color="C1", label="other tokens alone")
    _finish(prefix, "tokens of a prompt that are not shared", "ms to the first token")
    starts = result["starts"]
    sizes = [point["bytes"] / 1e6 for point in starts["points"]]
    for number, (what, kind) in enumerate((what, kind) for what in ("start", "read") for kind in ("warm", "cold")):
        seconds = [point[kind][f"{what}_seconds"]["median"] for point in starts["points"]]
        exponent = starts[kind][what]["power"]["exponent"]
        start.plot(sizes, seconds, "o-", color=f"C{number}", label=f"{what}, {kind}: exponent {exponent:.2f}")
    _finish(start, "MB of weights", "seconds")
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


def _draw_law(
    axes: Axes, curve: Mapping[str, Any], over: str, value: Callable[[Any], float], name: str, *, scale: float = 1
) -> None:
    """Draw measured points and their fitted power law, whose values `scale` converts to the unit of the points."""
    xs = [point[over] for point in curve["points"]]
    law = curve["fits"]["power"]
    (markers,) = axes.plot(xs, [value(point) for point in curve["points"]], "o")
    ys = [scale * law["factor"] * x ** law["exponent"] for x in (min(xs), max(xs))]
    label = f"{name}: exponent {law['exponent']:.2f}"
    axes.plot((min(xs), max(xs)), ys, "-", color=markers.get_color(), label=label)


def _finish(axes: Axes, x_label: str, y_label: str, ticks: Sequence[int] | None = None) -> None:
    """Make both axes of a plot logarithmic, and add labels, grid and legend."""
    axes.set_xscale("log", base=10 if ticks is None else 2)
    axes.set_yscale("log")
    if ticks is not None:
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=7)


def _save(figure: Figure, path: Path, result: Mapping[str, Any], dpi: int = 80) -> None:
    figure.savefig(path, dpi=dpi, metadata={"Source": digest(result), "Software": None})
