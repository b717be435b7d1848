"""Report of one or several loads as one HTML file: their figures, and plots over time with rejected requests.

`python -m loadtest.sweep.load_page results.json` writes it beside the results.
"""

import io
import json
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from loadtest.client.report import COLUMNS, notes, percentile_texts
from loadtest.client.timeline import PERCENTILES
from loadtest.measurement.figures import cell
from loadtest.sweep.page import _COLORS, _INK, _STYLE, _facts

# Ending in the timeline: its count in the summary, and its color.
_ENDINGS = {"ok": ("completed", "#3aa676"), "rejected": ("shed", "#d98a29"), "cancelled": ("cancelled", "#8a8f98"),
            "failed": ("failed", "#d05a5a")}  # fmt: skip


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
            for share, color in zip(PERCENTILES, (_COLORS[0], _COLORS[3]), strict=True):
                values = columns[f"p{share}_{metric}_ms"]
                axes.plot(seconds, values, "o-", color=color, markersize=2.5, linewidth=1.2, label=f"p{share}")
        titles = ("Requests/s by ending", "Tokens/s", "Time to first token, ms", "Inter-token latency, ms")
        for axes, title in zip((requests, tokens, *latencies), titles, strict=True):
            axes.set_title(title, loc="left", weight="bold")
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, alpha=0.25)
            axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 0.97), ncols=4)
        latencies[-1].set_xlabel("seconds since the first request")
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "currentColor")


def load_page(result: Mapping[str, Any]) -> str:
    """Return the report of a load, or of the loads in the field `loads`, as an HTML page."""
    loads = result.get("loads", [result])
    heads = "".join(f"<th>{escape(column.head)}</th>" for column in COLUMNS)
    rows = []
    for load in loads:
        cells = (escape(cell({**load, **percentile_texts(load)}, column)) for column in COLUMNS)
        rows.append(f"<tr>{''.join(f'<td>{text}</td>' for text in cells)}</tr>")
    lines = [line for load in loads for line in notes(load)] or ["No request failed, and no objective was missed."]
    facts = [
        f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in _facts(result) if text != "None"
    ]
    body = [
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>',
        f"<tbody>{''.join(rows)}</tbody></table></div>",
        f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>",
        *(f"<h2>{escape(load['label'])}</h2><figure>{draw_over_time(load)}</figure>" for load in loads if load["sent"]),
        f'<h2>Settings and provenance</h2><table class="facts"><tbody>{"".join(facts)}</tbody></table>',
    ]
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    title = f"Load test of {result.get('model_id', 'a service')}"
    subtitle = f"{result.get('url', '')} {result.get('date', '')}"
    return template.substitute(title=escape(title), subtitle=escape(subtitle), body="\n".join(body))


def write_load_report(path: Path) -> list[Path]:
    """Write the report of the loads in a JSON file beside it, as HTML. Return its path."""
    page = path.with_suffix(".html")
    page.write_text(load_page(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
    return [page]


if __name__ == "__main__":
    print(*write_load_report(Path(sys.argv[1])))
