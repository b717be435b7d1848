"""Generator of docs/metrics.md from service/metrics/definitions.py.

python -m monitoring.metrics_page            writes the page
python -m monitoring.metrics_page --check    exit code 1 if the page is out of date
"""

from pathlib import Path

from monitoring.generated_file import write_or_check
from service.metrics.definitions import COMMON_LABELS, FAMILIES, PREFIX, VLLM_PREFIX, Family, Kind

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

_HEAD = f"""# Metrics

`GET /metrics` returns the series below in Prometheus' text format, held by the API process. This page
is generated from `service/metrics/definitions.py` by `python -m monitoring.metrics_page`.

Every series also has the labels {" and ".join(f"`{label}`" for label in COMMON_LABELS)}. If the last column names a
`{VLLM_PREFIX}` series, the same samples are also exposed under that name. Dashboards, autoscalers and benchmark tools
made for vLLM therefore work unchanged. A histogram `x` consists of the series `x_bucket`, `x_sum` and `x_count`
(`retry_after_error_seconds` has buckets only, since its values may be negative).

A *choice* is one completion: a request with three prompts and `n: 2` has six choices. Latencies cover choices that
ended with `stop` or `length`. Cancelled and failed choices are counted, but only their time to first token and their
inter-token latencies are measured. Every counter starts at 0 for each label value listed below.

| series | type | unit | description | labels | vLLM |
|---|---|---|---|---|---|
"""


def render() -> str:
    """Return docs/metrics.md as Markdown text."""
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
