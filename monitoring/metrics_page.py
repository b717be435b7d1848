"""docs/metrics.md, written from service/metric_families.py.

python -m monitoring.metrics_page            writes the page
python -m monitoring.metrics_page --check    exit code 1 when the page is not what the table says
"""

from pathlib import Path

from monitoring.written_file import write_or_check
from service.metric_families import COMMON_LABELS, FAMILIES, PREFIX, VLLM_PREFIX, Family, Kind

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

_HEAD = f"""# Metrics

Written by `python -m monitoring.metrics_page` from `service/metric_families.py`. `GET /metrics` shows them, added up
over all processes of the service.

Every series also carries the labels {" and ".join(f"`{label}`" for label in COMMON_LABELS)}. Where the last column
names a `{VLLM_PREFIX}` series, the same samples are exposed under that name, too, so that dashboards, autoscalers and
benchmark tools made for vLLM work as they are. A histogram `x` is the series `x_bucket`, `x_sum` and `x_count`.

A *choice* is one completion: a request with three prompts and `n: 2` has six. Latencies are those of choices that
ended with `stop` or `length`; what was cancelled or failed is counted, and timed nowhere but in its first and
inter-token latencies. A counter has the label values listed below from the start, at 0.

| series | type | unit | what it says | labels | vLLM |
|---|---|---|---|---|---|
"""


def render() -> str:
    """The page."""
    buckets = "".join(
        f"| `{family.exposed_name}` | {' '.join(f'{bound:g}' for bound in family.buckets)} |\n"
        for family in FAMILIES.values()
        if family.kind is Kind.HISTOGRAM
    )
    rows = "".join(map(_row, FAMILIES.values()))
    return f"{_HEAD}{rows}\n## Buckets\n\n| histogram | upper bounds |\n|---|---|\n{buckets}"


def _row(family: Family) -> str:
    known = [dict.fromkeys(column) for column in zip(*family.known, strict=True)] or [{} for _ in family.labels]
    labels = "; ".join(
        f"`{label}`" + (f": {', '.join(values)}" if values else "")
        for label, values in zip(family.labels, known, strict=True)
    )
    twin = f"`{VLLM_PREFIX}{family.exposed_name.removeprefix(PREFIX)}`" if family.in_vllm else ""
    cells = (f"`{family.exposed_name}`", family.kind, family.unit, family.help, labels, twin)
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    raise SystemExit(write_or_check(PAGE, render(), command="python -m monitoring.metrics_page"))
