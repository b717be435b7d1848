"""Report of a sweep, a replay or other loads as one HTML file without links to other files, and as Markdown.

The plots are inline SVG. Their black becomes the page's text color, so that they suit light and dark pages.
`python -m loadtest.sweep.page results.json` writes the report beside the results.
"""

import io
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from loadtest.client.report import markdown, notes
from loadtest.client.timeline import PERCENTILES as PERCENTILES_OVER_TIME
from loadtest.measurement.figures import number
from loadtest.sweep.figures import METRICS, PERCENTILES, findings, has_objectives, report_lines, sweep_table, warnings
from loadtest.sweep.level import State
from loadtest.sweep.server_side import PHASES

_INK = "#010203"  # replaced by the page's text color
_COLORS = ("#4c8dd6", "#3aa676", "#d98a29", "#d05a5a")  # legible on white and on black
# Ending in the timeline: its count in the summary, and its color.
_ENDINGS = {"ok": ("completed", "#3aa676"), "rejected": ("shed", "#d98a29"), "cancelled": ("cancelled", "#8a8f98"),
            "failed": ("failed", "#d05a5a")}  # fmt: skip
_LONG = {"TTFT": "Time to first token", "ITL": "Inter-token latency", "E2E": "End-to-end latency"}
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
}


def draw(name: str, sweep: Mapping[str, Any], fill: Callable[[Axes], None]) -> str:
    """Return a plot over the rate as an SVG element. `fill` draws into its axes."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(5, 3.4), layout="constrained")
        axes = figure.subplots()
        fill(axes)
        axes.set_xscale("log")
        _label_ticks(axes.xaxis, (1, 2, 3, 5, 7))
        _mark_limits(axes, sweep)
        axes.set_title(name, loc="left", weight="bold")
        axes.set_xlabel("requests/s sent")
        axes.grid(visible=True, alpha=0.25)
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
        return _svg(figure, name)


def draw_over_time(load: Mapping[str, Any]) -> str:
    """Return plots of a load over time as an SVG element: requests/s by ending, tokens/s, TTFT and ITL."""
    columns = {name: [row[name] for row in load["timeline"]] for name in load["timeline"][0]}
    seconds = columns["seconds"]
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": load["label"]}):
        figure = Figure(figsize=(9, 9), layout="constrained")
        requests, tokens, *latencies = figure.subplots(4, 1, sharex=True)
        requests.stackplot(
            seconds,
            [columns[name] for name in _ENDINGS],
            labels=[f"{load[count]:,} {name}" for name, (count, _) in _ENDINGS.items()],
            colors=[color for _, color in _ENDINGS.values()],
            step="post",
            linewidth=0,
        )
        tokens.step(seconds, columns["tokens"], where="post", color=_COLORS[0], label="completion tokens")
        for axes, metric in zip(latencies, ("ttft", "itl"), strict=True):
            for share, color in zip(PERCENTILES_OVER_TIME, (_COLORS[0], _COLORS[3]), strict=True):
                values = columns[f"p{share}_{metric}_ms"]
                axes.plot(seconds, values, "o-", color=color, markersize=2.5, linewidth=1.2, label=f"p{share}")
        titles = ("Requests/s by ending", "Tokens/s", "Time to first token, ms", "Inter-token latency, ms")
        for axes, title in zip((requests, tokens, *latencies), titles, strict=True):
            axes.set_title(title, loc="left", weight="bold")
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, alpha=0.25)
            axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 0.97), ncols=4)
        latencies[-1].set_xlabel("seconds since the first request")
        return _svg(figure, f"{load['label']} over time")


def _svg(figure: Figure, name: str) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue().replace(_INK, "currentColor")
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(name)}"', 1)


def _label_ticks(axis: Axis, digits: Sequence[int]) -> None:
    """Label the ticks of a logarithmic axis that begin with one of the digits."""
    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


def _mark_limits(axes: Axes, sweep: Mapping[str, Any]) -> None:
    """Shade the rates that are not stable, and mark the knee and the highest rate within the objectives."""
    rates = [level["rate"] for level in sweep["levels"]]
    axes.set_xlim(0.9 * min(rates), 1.1 * max(rates))
    if (above := sweep["stable_rate"]["lowest_above"]) is not None:
        axes.axvspan(above, 1.1 * max(rates), color=_COLORS[3], alpha=0.1, linewidth=0)
    limits = {
        "knee": None if sweep["knee_rate"] == min(rates) else sweep["knee_rate"],
        "objectives": sweep["slo_rate"]["highest"] if has_objectives(sweep) else None,
    }
    for height, (label, rate) in zip((0.98, 0.6), limits.items(), strict=True):
        if rate is not None:
            axes.axvline(rate, color=_INK, linewidth=0.8, linestyle="--")
            place = axes.get_xaxis_transform()
            axes.text(rate, height, f"{label} ", rotation=90, fontsize=8, ha="right", va="top", transform=place)


def plots(sweep: Mapping[str, Any]) -> list[str]:
    """Return the plots of a sweep over the rate: throughput with goodput, TTFT, ITL, E2E, and a request's phases."""

    if not sweep["levels"]:
        return []

    def throughput(axes: Axes) -> None:
        rates = [level["rate"] for level in sweep["levels"]]
        axes.plot(rates, rates, ":", color=_INK, linewidth=1, label="all that is sent")
        _line(axes, sweep["levels"], "request_throughput", _COLORS[0], "ok")
        if has_objectives(sweep):
            _line(axes, sweep["levels"], "request_goodput", _COLORS[1], "within the objectives")
        if sweep["capacity"] is not None:
            served = sweep["capacity"]["requests_per_second"]
            axes.axhspan(served["low"], served["high"], color=_INK, alpha=0.12, linewidth=1, label="capacity")
            most = max(level["request_throughput"] for level in sweep["levels"])
            axes.set_ylim(0, 1.2 * max(served["mean"], most))

    def latency(metric: str) -> Callable[[Axes], None]:
        def fill(axes: Axes) -> None:
            for color, percentile in zip(_COLORS, PERCENTILES, strict=True):
                _line(axes, sweep["levels"], f"p{percentile:g}_{metric}_ms", color, f"p{percentile:g}")
            axes.set_yscale("log")
            _label_ticks(axes.yaxis, (1, 2, 5))

        return fill

    def phases(axes: Axes) -> None:
        levels = [level for level in sweep["levels"] if any(level["server_ms"].values())]
        parts = [[level["server_ms"][phase] or 0.0 for level in levels] for phase in PHASES]
        axes.stackplot([level["rate"] for level in levels], parts, labels=PHASES, colors=_COLORS, alpha=0.8)

    drawn = [draw("Requests/s completed", sweep, throughput)]
    drawn += [draw(f"{_LONG[name]}, ms", sweep, latency(metric)) for metric, name in METRICS.items()]
    has_phases = any(any(level["server_ms"].values()) for level in sweep["levels"])
    return drawn + ([draw("Mean time of a request by phase, ms", sweep, phases)] if has_phases else [])


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


_RATE = {"requests/s": "rate"}
_LEVEL = _RATE | {"state": "state"}
_LOAD = {"load": "label"}
_THROUGHPUT = {
    "ok/s": "request_throughput",
    "tokens/s": "output_throughput",
    "goodput/s": "request_goodput",
    "requests": "num_prompts",
    "failed": "failed",
    "cancelled": "cancelled",
    "429": "shed",
    "client CPU": "client_cpu_share",
}
_PHASES = {"warm-up s": "warm_up_seconds"} | {f"{phase} ms": phase for phase in PHASES}


def _latencies(metrics: Mapping[str, str], shares: Sequence[float]) -> dict[str, str]:
    return {f"{name} p{each:g}": f"p{each:g}_{metric}_ms" for metric, name in metrics.items() for each in shares}


def level_table(loads: Sequence[Mapping[str, Any]], caption: str, columns: Mapping[str, str]) -> str:
    """Return figures of loads as an HTML table that the page can sort; `columns`: the key of each heading."""
    rows = []
    for load in loads:
        cells, figures = [], {**dict.fromkeys(PHASES), **load, **load.get("server_ms", {})}
        for value, key in ((figures[key], key) for key in columns.values()):
            low, high = load.get("intervals", {}).get(key, (None, math.inf))
            interval = "" if math.isinf(high) else f"<small>{number(max(0.0, low))}–{number(high)}</small>"
            text = f"{value:.0%}" if key == "client_cpu_share" else _text(value)
            order = -1 if value is None else value
            cells.append(f'<td data-value="{escape(str(order))}">{escape(text)}{interval}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{escape(each)}</th>" for each in columns)
    return (
        f'<div class="scroll"><table class="levels"><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


_FACTS = {
    "server": "url",
    "model": "model_id",
    "command": "command",
    "settings": "settings",
    "workload": "workload",
    "objectives": "slo",
    "latency of a request alone, s": "alone_seconds",
    "duration of the sweep, s": "took_seconds",
    "date": "date",
    "commit": "commit",
    "client's machine": "machine",
    "client's versions": "versions",
    "cores busy with other work": "other_work_cores",
}


def _facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return settings, workload, objectives and provenance of a result, as pairs of name and text."""
    is_shown = {"slo": "levels" not in result or has_objectives(result)}
    return [
        (name, _text(result[key]))
        for name, key in _FACTS.items()
        if result.get(key) is not None and is_shown.get(key, True)
    ]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items() if each is not None)
    return number(value) if value is None or isinstance(value, float | int) else str(value)


def _title(result: Mapping[str, Any]) -> str:
    return f"Load {result.get('kind', 'test')} of {result.get('model_id', 'a service')}"


def _listed(lines: Sequence[str], attributes: str = "") -> str:
    return f"<ul{attributes}>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def html_page(result: Mapping[str, Any]) -> str:
    """Return the report of a sweep, of a replay, or of other loads, as an HTML page."""
    facts = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in _facts(result))
    body = _limits_body(result) if "levels" in result else _loads_body(result.get("loads", [result]))
    body += ["<h2>Settings and provenance</h2>", f'<table class="facts"><tbody>{facts}</tbody></table>']
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    subtitle = f"{result.get('url', '')} {result.get('date', '')}"
    return template.substitute(title=escape(_title(result)), subtitle=escape(subtitle), body="\n".join(body))


def _limits_body(sweep: Mapping[str, Any]) -> list[str]:
    """Return findings, plots and tables of a sweep over its rates, or of a replay over time."""
    lead, *others = findings(sweep)
    doubts = warnings(sweep)
    is_replay = sweep["kind"] == "replay"
    drawn = [draw_over_time(level) for level in sweep["levels"]] if is_replay else plots(sweep)
    figures = "".join(f"<figure>{plot}</figure>" for plot in drawn)
    legend = '<p class="faint">Shaded, with hollow markers: overloaded or unclear. Bars: 95 % intervals.</p>'
    terms = " ".join(f"{short}: {name.lower()}." for short, name in _LONG.items())
    throughput = {name: key for name, key in _THROUGHPUT.items() if key != "request_goodput" or has_objectives(sweep)}
    return [
        "<h2>Warnings</h2>" + _listed(doubts, ' class="warnings"') if doubts else "",
        f'<p class="lead">{escape(lead)}</p>',
        _listed(others),
        "<h2>Plots</h2>",
        figures if is_replay else f'<div class="plots">{figures}</div>',
        "" if is_replay else legend,
        "<h2>Figures</h2>",
        '<p class="faint">Small: 95 % intervals. A dash: too few requests. A click on a heading sorts.</p>',
        f'<p class="faint">{terms}</p>',
        level_table(sweep["levels"], "Throughput, and mean time of a request by phase", _LEVEL | throughput | _PHASES),
        level_table(sweep["levels"], "Latencies in ms", _RATE | _latencies(METRICS, PERCENTILES)),
    ]


def _loads_body(loads: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return figures and plots over time of one load, or of several."""
    lines = [line for load in loads for line in notes(load)] or ["No request failed, and no objective was missed."]
    return [
        _listed(lines),
        level_table(loads, "Throughput", _LOAD | _THROUGHPUT),
        level_table(loads, "Latencies in ms", {"load": "label"} | _latencies(METRICS | {"tpot": "TPOT"}, (50, 95, 99))),
        *(f"<h2>{escape(load['label'])}</h2><figure>{draw_over_time(load)}</figure>" for load in loads if load["sent"]),
    ]


def markdown_page(result: Mapping[str, Any]) -> str:
    """Return the report of a sweep, of a replay, or of other loads, as Markdown without plots."""
    lines = [f"# {_title(result)}", ""]
    if "levels" in result:
        lines += [*report_lines(result), "", "## Rates", "", sweep_table(result)]
    else:
        lines += [markdown(result.get("loads", [result])), ""]
    facts = "\n".join(f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in _facts(result))
    return "\n".join([*lines, "## Settings and provenance", "", "| | |", "|---|---|", facts, ""])


def write_report(path: Path) -> list[Path]:
    """Write the report of a JSON file beside that file, as HTML and as Markdown. Return both paths."""
    result, written = json.loads(path.read_text(encoding="utf-8")), []
    for suffix, page in ((".html", html_page), (".md", markdown_page)):
        written.append(path.with_suffix(suffix))
        written[-1].write_text(page(result), encoding="utf-8")
    return written


if __name__ == "__main__":
    print(*write_report(Path(sys.argv[1])), sep="\n")
