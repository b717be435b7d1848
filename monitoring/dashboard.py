"""The Grafana dashboard, written from monitoring/panels.py.

python -m monitoring.dashboard            writes grafana/dashboards/kvasir.json
python -m monitoring.dashboard --check    exit code 1 when the file is not what the panels say
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from monitoring.panels import ROWS, Panel
from monitoring.written_file import write_or_check

FILE: Final = Path(__file__).resolve().parent / "grafana" / "dashboards" / "kvasir.json"

_DATASOURCE: Final = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
_COLUMNS: Final = 24  # Grafana's grid
_HEIGHT: Final = 8

# What each kind of panel adds to the common parts: the look of its values, and its options.
_LEGEND: Final = {"displayMode": "table", "placement": "right", "showLegend": True, "calcs": ["lastNotNull", "max"]}
_LOOKS: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "timeseries": (
        {"custom": {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}, "min": 0},
        {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
    ),
    "heatmap": (
        {"custom": {"scaleDistribution": {"type": "linear"}}},
        {
            "calculate": False,
            "color": {"mode": "scheme", "scheme": "Oranges", "scale": "exponential", "exponent": 0.5, "steps": 64},
            "filterValues": {"le": 1e-9},
            "yAxis": {"axisPlacement": "left", "unit": "none"},
            "tooltip": {"mode": "single", "yHistogram": True},
        },
    ),
    "state-timeline": (
        {"custom": {"fillOpacity": 70, "lineWidth": 0}, "mappings": []},
        {"showValue": "never", "mergeValues": True, "legend": {"displayMode": "list", "placement": "bottom"}},
    ),
    "stat": (
        {"mappings": []},
        {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "none"},
    ),
}
# A stat of an info series shows its labels; the value is always 1.
_INFO_OPTIONS: Final = {"textMode": "name"}


def render() -> str:
    """The dashboard's JSON."""
    dashboard = {
        "uid": "kvasir",
        "title": "Kvasir",
        "description": "What the service does, for whom, and how well. Written by `python -m monitoring.dashboard`.",
        "tags": ["llm", "inference"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource_variable(), _model_variable()]},
        "panels": list(_panels()),
    }
    return json.dumps(dashboard, indent=2) + "\n"


def _datasource_variable() -> dict[str, Any]:
    return {"name": "DS_PROMETHEUS", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _model_variable() -> dict[str, Any]:
    query = "label_values(llm_build_info, model_name)"
    return {
        "name": "model_name",
        "label": "Model",
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "Models"},
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
    }


def _panels() -> Iterator[dict[str, Any]]:
    """Headings and panels from left to right and top to bottom, numbered in that order."""
    ids = itertools.count(1)
    y = 0
    for row in ROWS:
        yield {"id": next(ids), "type": "row", "title": row.title, "collapsed": False, "panels": [],
               "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1}}  # fmt: skip
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y = 0, y + _HEIGHT
            yield {"id": next(ids), "gridPos": {"x": x, "y": y, "w": panel.width, "h": _HEIGHT}, **_panel(panel)}
            x += panel.width
        y += _HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    defaults, options = _LOOKS[panel.kind]
    is_info = panel.kind == "stat" and panel.unit == "none"
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, **defaults}, "overrides": []},
        "options": options | _INFO_OPTIONS if is_info else options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "range": panel.kind != "stat",
                "instant": panel.kind == "stat",
                **({"format": "heatmap"} if panel.kind == "heatmap" else {}),
            }
            for index, query in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    raise SystemExit(write_or_check(FILE, render(), command="python -m monitoring.dashboard"))
