"""Picture of bench_scaling: four panels, logarithmic on both axes, with the fitted lines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.measurement.provenance import digest

_DPI = 80


def draw_scaling(path: Path, result: Mapping[str, Any]) -> None:
    """Draw step time, KV-cache memory, TTFT and start time, each over its size."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    (steps, memory), (prefix, start) = figure.subplots(2, 2)
    for name, key in (("batch", "batch_size"), ("context", "context_length")):
        curve = result["steps"][f"over_{name}"]
        _draw(steps, curve, key, lambda point: point["step_ms"]["median"], name)
    _label(steps, "sequences, or tokens of each", "ms a step")
    _draw(memory, result["kv_memory"], "tokens", lambda point: point["bytes"] / 1e6, "resident", scale=1e-6)
    tokens = [point["tokens"] for point in result["kv_memory"]["points"]]
    each = result["kv_memory"]["bytes_per_token"] / 1e6
    memory.plot(tokens, [count * each for count in tokens], ":", color="black", label="formula")
    _label(memory, "tokens", "MB of KV-cache")
    points = result["prefixes"]["points"]
    _draw(prefix, result["prefixes"], "rest_tokens", lambda point: point["ttft_ms"]["median"], "cached prefix")
    alone = [(point["rest_tokens"], point["rest_alone_ms"]["median"]) for point in points]
    prefix.plot(*zip(*alone, strict=True), "x", color="C1", label="other tokens alone")
    _label(prefix, "tokens of a prompt that are not shared", "ms to the first token")
    _draw_starts(start, result["starts"])
    figure.savefig(path, dpi=_DPI, metadata={"Source": digest(result), "Software": None})


def _draw(
    axes: Axes,
    curve: Mapping[str, Any],
    over: str,
    value: Any,
    name: str,
    *,
    color: str | None = None,
    scale: float = 1,
) -> None:
    """Draw points and the power law through them. `scale` converts from the unit in which the law was fitted."""
    xs = [point[over] for point in curve["points"]]
    law = curve["fits"]["power"]
    (markers,) = axes.plot(xs, [value(point) for point in curve["points"]], "o", color=color)
    ends = (min(xs), max(xs))
    ys = [scale * law["factor"] * x ** law["exponent"] for x in ends]
    axes.plot(ends, ys, "-", color=markers.get_color(), label=f"{name}: exponent {law['exponent']:.2f}")


def _draw_starts(axes: Axes, starts: Mapping[str, Any]) -> None:
    sizes = [point["bytes"] / 1e6 for point in starts["points"]]
    for number, (kind, what) in enumerate(_kinds_of_start()):
        seconds = [point[kind][f"{what}_seconds"]["median"] for point in starts["points"]]
        exponent = starts[kind][what]["power"]["exponent"]
        axes.plot(sizes, seconds, "o-", color=f"C{number}", label=f"{what}, {kind}: exponent {exponent:.2f}")
    _label(axes, "MB of weights", "seconds")


def _kinds_of_start() -> Sequence[tuple[str, str]]:
    return [(kind, what) for what in ("start", "read") for kind in ("warm", "cold")]


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=7)
