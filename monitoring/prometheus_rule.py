"""Generator of deploy/kubernetes/monitoring/prometheus-rule.yaml, the rules for the Prometheus operator.

`python -m monitoring.prometheus_rule` writes the file from monitoring/rules.
"""

import sys
from pathlib import Path

import yaml

from monitoring.generated_file import write_or_check

_ROOT = Path(__file__).resolve().parent.parent
PATH = _ROOT / "deploy/kubernetes/monitoring/prometheus-rule.yaml"
_COMMAND = "python -m monitoring.prometheus_rule"


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def prometheus_rule() -> str:
    """Return the text of the file: one PrometheusRule with the groups of all files in monitoring/rules."""
    paths = sorted((_ROOT / "monitoring/rules").glob("*.yml"))
    groups = [group for path in paths for group in yaml.safe_load(path.read_text())["groups"]]
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvasir", "labels": {"app.kubernetes.io/name": "kvasir"}},
        "spec": {"groups": groups},
    }
    text = yaml.dump(rule, Dumper=_Dumper, sort_keys=False, width=120)
    return f"# Written by `{_COMMAND}` from monitoring/rules. Do not edit.\n{text}"


if __name__ == "__main__":
    sys.exit(write_or_check(PATH, prometheus_rule(), command=_COMMAND))
