"""Parser for the PromQL expressions of rules and dashboards."""

import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

import promql_parser

from tests.ops.deployment import ROOT, read_yaml

RULE_FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "monitoring" / "rules").glob("*.yml"))
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "monitoring/grafana/dashboards").glob("*.json"))
}

MODEL_VARIABLE = "$model_name"


def rules() -> list[dict[str, Any]]:
    """Return the recording rules and alerts of all files."""
    return [rule for path in RULE_FILES for group in read_yaml(path)["groups"] for rule in group["rules"]]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a dashboard, without headings."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def questions() -> list[str]:
    """Return the PromQL expressions of all rules and of all panels of the dashboards."""
    shown = [panel for dashboard in DASHBOARDS.values() for panel in panels(dashboard)]
    return [rule["expr"] for rule in rules()] + [target["expr"] for panel in shown for target in panel["targets"]]


@dataclass(frozen=True, slots=True)
class Matcher:
    """One label matcher of a selector."""

    label: str
    value: str
    is_pattern: bool

    def matches(self, value: str | None) -> bool:
        """Return True if a label value satisfies the matcher."""
        if value is None:
            return False
        if self.value.startswith(MODEL_VARIABLE):
            return True
        return bool(re.fullmatch(self.value, value)) if self.is_pattern else self.value == value


@dataclass(frozen=True, slots=True)
class Selection:
    """One metric that an expression reads, its label matchers, and its grouping labels."""

    metric: str
    matchers: tuple[Matcher, ...]
    groupings: frozenset[str]

    def means(self, labels: dict[str, str]) -> bool:
        """Return True if a series with these labels is selected."""
        return all(matcher.matches(labels.get(matcher.label)) for matcher in self.matchers)


def selections(expr: str) -> list[Selection]:
    """Return the metrics that an expression reads. Raises `ValueError` for invalid PromQL."""
    found: list[Selection] = []
    around: list[list[str]] = []  # the enclosing groupings

    def enter(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.AggregateExpr):
            around.append(node.modifier.labels if node.modifier else [])
        elif isinstance(node, promql_parser.VectorSelector):
            matchers = tuple(
                Matcher(matcher.name, matcher.value, matcher.op == promql_parser.MatchOp.Re)
                for matcher in node.matchers.matchers
            )
            found.append(Selection(str(node.name), matchers, frozenset(itertools.chain(*around))))

    def leave(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.AggregateExpr):
            around.pop()

    promql_parser.walk(promql_parser.parse(expr.replace("$__rate_interval", "1m")), enter, leave)
    return found
