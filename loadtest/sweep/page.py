"""Report of a sweep as one HTML file without links to other files, and the same as Markdown.

The plots are inline SVG. Their black becomes the page's text color, so that they suit light and dark pages.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from loadtest.sweep.figures import METRICS, PERCENTILES, findings, number, sweep_table, warnings
from loadtest.sweep.level import State
from loadtest.sweep.server_side import PHASES

_INK = "#010203"  # replaced by the page's text color
_COLORS = ("#4c8dd6", "#3aa676", "#d98a29", "#d05a5a")  # legible on white and on black
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
}


def draw(name: str, fill: Callable[[Axes], None]) -> str:
    """Return a plot as an SVG element, whose axes the function fills."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.subplots()
        fill(axes)
        axes.set_title(name, loc="left")
        axes.set_xlabel("requests/s sent")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.grid(visible=True, alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "currentColor")


def plots(sweep: Mapping[str, Any]) -> list[str]:
    """Return the plots of a sweep over the rate: throughput with goodput, TTFT, ITL, E2E, and a request's phases."""

    def throughput(axes: Axes) -> None:
        rates = [level["rate"] for level in sweep["levels"]]
        axes.plot(rates, rates, ":", color=_INK, linewidth=1, label="all that is sent")
        for color, (key, label) in zip(
            _COLORS, (("request_throughput", "ok"), ("request_goodput", "within the objectives")), strict=False
        ):
            _line(axes, sweep["levels"], key, color, label)
        if sweep["capacity"] is not None:
            served = sweep["capacity"]["requests_per_second"]
            axes.axhspan(served["low"], served["high"], color=_COLORS[3], alpha=0.35, linewidth=1, label="capacity")
            axes.set_ylim(0, 1.25 * served["mean"])
        marks = ((sweep["knee_rate"], "knee", 0.02), (sweep["slo_rate"]["highest"], "objectives", 0.4))
        for rate, label, height in marks:
            if rate is not None:
                axes.axvline(rate, color=_INK, linewidth=0.8, linestyle="--")
                axes.text(
                    rate, height, label, rotation=90, fontsize=8, ha="right", transform=axes.get_xaxis_transform()
                )

    def latency(metric: str) -> Callable[[Axes], None]:
        def fill(axes: Axes) -> None:
            for color, percentile in zip(_COLORS, PERCENTILES, strict=True):
                _line(axes, sweep["levels"], f"p{percentile:g}_{metric}_ms", color, f"p{percentile:g}")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(LogFormatter())  # labels minor ticks within less than a decade

        return fill

    def phases(axes: Axes) -> None:
        levels = [level for level in sweep["levels"] if any(level["server_ms"].values())]
        parts = [[level["server_ms"][phase] or 0.0 for level in levels] for phase in PHASES]
        axes.stackplot([level["rate"] for level in levels], parts, labels=PHASES, colors=_COLORS, alpha=0.8)

    drawn = [draw("Requests/s completed", throughput)]
    drawn += [draw(f"{name}, ms", latency(metric)) for metric, name in METRICS.items()]
    has_phases = any(any(level["server_ms"].values()) for level in sweep["levels"])
    return drawn + ([draw("Mean time of a request by phase, ms", phases)] if has_phases else [])


def _line(axes: Axes, levels: Sequence[Mapping[str, Any]], key: str, color: str, label: str) -> None:
    """Draw a figure of the levels over the rate, with its intervals. Rates that are not stable get hollow markers."""
    points = [level for level in levels if level[key] is not None]
    bounds = [level["intervals"].get(key, (level[key],) * 2) for level in points]
    xs, ys = [level["rate"] for level in points], [level[key] for level in points]
    errors = [[y - low for y, (low, _) in zip(ys, bounds, strict=True)],
              [high - y for y, (_, high) in zip(ys, bounds, strict=True)]]  # fmt: skip
    axes.errorbar(
        xs, ys, [[max(0.0, error) for error in side] for side in errors], color=color, label=label, linewidth=1.4
    )
    for state, face in ((State.STABLE, color), (None, "none")):
        chosen = [
            (x, y)
            for x, y, level in zip(xs, ys, points, strict=True)
            if (level["state"] == State.STABLE) == (state is not None)
        ]
        if chosen:
            axes.plot(*zip(*chosen, strict=True), "o", color=color, markerfacecolor=face, markersize=5)


_HEADS = ("requests/s", "state", "ok/s", "tokens/s", "goodput/s")


def level_table(sweep: Mapping[str, Any]) -> str:
    """Return the levels as an HTML table whose columns the page can sort; intervals are the cells' titles."""
    keys = ["rate", "state", "request_throughput", "output_throughput", "request_goodput"]
    heads = list(_HEADS)
    for metric, name in METRICS.items():
        keys += [f"p{percentile:g}_{metric}_ms" for percentile in PERCENTILES]
        heads += [f"{name} p{percentile:g}" for percentile in PERCENTILES]
    keys += ["failed", "shed", "num_prompts", "warm_up_seconds", "client_cpu_share"]
    heads += ["failed", "429", "requests", "warm-up s", "client CPU"]
    keys += PHASES
    heads += [f"{phase}, mean" for phase in PHASES]
    rows = []
    for level in sweep["levels"]:
        cells, level = [], level | dict.fromkeys(PHASES) | level["server_ms"]
        for key in keys:
            value = level[key]
            text = value if isinstance(value, str) else number(value)
            low, high = level["intervals"].get(key, (None, None))
            title = "" if low is None else f' title="95 %: {number(low)} to {number(high)}"'
            cells.append(f'<td data-value="{escape(str(-1 if value is None else value))}"{title}>{escape(text)}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    return (
        f'<div class="scroll"><table class="levels"><caption>Latencies in ms; a cell shows its 95 % interval on hover; '
        f"a dash: too few requests for this percentile.</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _facts(sweep: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return settings, workload, objectives and provenance of a sweep, as pairs of name and text."""
    parts = ("url", "model_id", "command", "date", "commit", "took_seconds", "other_work_cores", "machine", "versions",
             "settings", "workload", "slo")  # fmt: skip
    facts = []
    for name in parts:
        value = sweep.get(name)
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {each}" for key, each in value.items() if each is not None)
        facts.append((name.replace("_", " "), str(value)))
    return facts


def _title(sweep: Mapping[str, Any]) -> str:
    return f"Load {sweep.get('kind', 'sweep')} of {sweep['model_id']}"


def html_page(sweep: Mapping[str, Any]) -> str:
    """Return the report of a sweep as an HTML page."""
    items = "".join(f"<li>{escape(line)}</li>" for line in findings(sweep))
    doubts = "".join(f"<li>{escape(line)}</li>" for line in warnings(sweep))
    facts = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in _facts(sweep))
    body = [
        f"<ul>{items}</ul>",
        f'<h2>Warnings</h2><ul class="warnings">{doubts}</ul>' if doubts else "",
        "<h2>Plots</h2>",
        f'<div class="plots">{"".join(f"<figure>{plot}</figure>" for plot in plots(sweep))}</div>',
        "<p class=faint>Hollow markers: overloaded or unclear. Bars: 95 % intervals.</p>",
        "<h2>Rates</h2>",
        level_table(sweep),
        "<h2>Settings and provenance</h2>",
        f'<table class="facts"><tbody>{facts}</tbody></table>',
    ]
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    title, subtitle = (_title(sweep), f"{sweep['url']}, {sweep.get('date', '')}")
    return template.substitute(title=escape(title), subtitle=escape(subtitle), body="\n".join(body))


def markdown_page(sweep: Mapping[str, Any]) -> str:
    """Return the report of a sweep as Markdown, without plots."""
    lines = [f"# {_title(sweep)}", "", *(f"- {line}" for line in findings(sweep))]
    lines += ["", *(f"- warning: {line}" for line in warnings(sweep)), "", "## Rates", "", sweep_table(sweep)]
    facts = "\n".join(f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in _facts(sweep))
    return "\n".join([*lines, "## Settings and provenance", "", "| | |", "|---|---|", facts, ""])


def write_report(path: Path) -> list[Path]:
    """Write the report of the sweep in a JSON file beside it, as HTML and as Markdown. Return both paths."""
    sweep, written = json.loads(path.read_text(encoding="utf-8")), []
    for suffix, page in ((".html", html_page), (".md", markdown_page)):
        written.append(path.with_suffix(suffix))
        written[-1].write_text(page(sweep), encoding="utf-8")
    return written
