"""Report of load tests: results.json with the keys of `vllm bench serve`, a Markdown table and pictures.

    python -m loadtest.client.report results/*.json --out results

makes the table and the pictures again from stored results.

Keys beyond vLLM's: `sent`, `shed`, `cancelled`, `failures` by kind, `slo_breaches`, `client_cpu_share`, `clients`,
`endings` and `chunk_times`. Throughput counts the tokens of completed requests. Latencies count from the intended
send; vLLM's count from the actual send.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.client.outcome import Ending, Outcome
from loadtest.client.slo import Slo
from loadtest.measurement.tables import Column, table

PERCENTILES = (50, 90, 95, 99)
LATENCY_NAMES = ("Time to first token", "Inter-token latency", "End-to-end latency")


def summarize(
    outcomes: Sequence[Outcome],
    *,
    label: str,
    duration_seconds: float,
    slo: Slo,
    request_rate: float | None,
    max_concurrency: int | None,
    client_cpu_share: float,
) -> dict[str, Any]:
    """Return one run with the keys of `vllm bench serve` and those above. JSON-ready."""
    done = [outcome for outcome in outcomes if outcome.ending is Ending.OK]
    failures = Counter(f"{o.ending.value}: {o.detail}"[:120] for o in outcomes if o.ending.is_failure)
    input_tokens, output_tokens = (sum(getattr(o, name) for o in done) for name in _TOKEN_FIELDS)
    result: dict[str, Any] = {
        "label": label,
        "num_prompts": len(outcomes),
        "request_rate": "inf" if request_rate is None else request_rate,
        "burstiness": 1.0,
        "max_concurrency": max_concurrency,
        "duration": duration_seconds,
        "completed": len(done),
        "failed": sum(failures.values()),
        "sent": len(outcomes),
        "shed": sum(outcome.ending is Ending.SHED for outcome in outcomes),
        "cancelled": sum(outcome.ending is Ending.CANCELLED for outcome in outcomes),
        "failures": dict(failures.most_common()),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration_seconds,
        "request_goodput": sum(slo.is_good(outcome) for outcome in outcomes) / duration_seconds,
        "output_throughput": output_tokens / duration_seconds,
        "total_token_throughput": (input_tokens + output_tokens) / duration_seconds,
        "max_output_tokens_per_s": _peak_tokens_per_second(done),
        "max_concurrent_requests": _peak_concurrency(outcomes),
        "client_cpu_share": client_cpu_share,
        "slo_breaches": slo.breaches(outcomes, duration_seconds),
    }
    return result | _latencies(done) | _details(outcomes)


_TOKEN_FIELDS = ("prompt_tokens", "completion_tokens")


def _latencies(done: Sequence[Outcome]) -> dict[str, float | None]:
    seconds: dict[str, list[float]] = {
        "ttft": [o.ttft_seconds for o in done if o.ttft_seconds is not None],
        "tpot": [o.tpot_seconds for o in done if o.tpot_seconds is not None],
        "itl": [gap for o in done for gap in o.itl_seconds],
        "e2el": [o.e2e_seconds for o in done],
    }
    result: dict[str, float | None] = {}
    for metric, values in seconds.items():
        known = 1e3 * np.array(values) if values else None
        result[f"mean_{metric}_ms"] = None if known is None else float(known.mean())
        result[f"median_{metric}_ms"] = None if known is None else float(np.median(known))
        result[f"std_{metric}_ms"] = None if known is None else float(known.std())
        for percentile in PERCENTILES:
            value = None if known is None else float(np.percentile(known, percentile))
            result[f"p{percentile}_{metric}_ms"] = value
    return result


def _details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Return per-request lists, in the order of the requests."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.index)
    start = min((outcome.intended_seconds for outcome in ordered), default=0.0)
    return {
        "input_lens": [o.prompt_tokens for o in ordered],
        "output_lens": [o.completion_tokens for o in ordered],
        "ttfts": [o.ttft_seconds for o in ordered],
        "itls": [list(o.itl_seconds) for o in ordered],
        "latencies": [o.e2e_seconds for o in ordered],
        "start_times": [o.intended_seconds - start for o in ordered],
        "queue_times": [o.sent_seconds - o.intended_seconds for o in ordered],
        "errors": [o.detail for o in ordered],
        "endings": [o.ending.value for o in ordered],
        "clients": [o.client.value for o in ordered],
        "chunk_times": [[seconds - start for seconds in o.chunk_seconds] for o in ordered],
    }


def _peak_tokens_per_second(done: Sequence[Outcome]) -> float:
    seconds = [second for outcome in done for second in outcome.chunk_seconds]
    if not seconds:
        return 0.0
    return float(np.bincount((np.array(seconds) - min(seconds)).astype(int)).max())


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    # A departure at the time of an arrival comes first: (time, -1) sorts before (time, +1).
    moves = sorted(move for o in outcomes for move in ((o.sent_seconds, 1), (o.end_seconds, -1)))
    return int(np.cumsum([change for _, change in moves]).max()) if moves else 0


_PERCENTILES_HEAD = {"ttft": (50, 95, 99), "itl": (50, 95, 99), "tpot": (50,), "e2el": (50, 95)}
_COLUMNS = (
    Column("run", "label"),
    Column("sent", "sent"),
    Column("ok", "completed"),
    Column("shed", "shed"),
    Column("cancelled", "cancelled"),
    Column("failed", "failed"),
    Column("req/s", "request_throughput", ".2f"),
    Column("tokens/s", "output_throughput", ".0f"),
    Column("goodput/s", "request_goodput", ".2f"),
    Column("TTFT p50/p95/p99 ms", "ttft"),
    Column("ITL p50/p95/p99 ms", "itl"),
    Column("TPOT p50 ms", "tpot"),
    Column("E2E p50/p95 ms", "e2el"),
    Column("client CPU", "client_cpu_share", ".0%"),
)


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row per run, and below it the failures and broken objectives."""
    rows = [run | {name: _percentiles(run, name) for name in _PERCENTILES_HEAD} for run in results]
    notes = [f"- {run['label']}: {count} × {kind}" for run in results for kind, count in run["failures"].items()]
    notes += [f"- {run['label']}: broken objective: {breach}" for run in results for breach in run["slo_breaches"]]
    return "\n".join([table(_COLUMNS, rows), *notes])


def _percentiles(run: dict[str, Any], metric: str) -> str:
    values = [run[f"p{percentile}_{metric}_ms"] for percentile in _PERCENTILES_HEAD[metric]]
    return " / ".join("–" if value is None else f"{value:.1f}" for value in values)


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG: distributions of every run, and saturation over the runs."""
    figure = Figure(figsize=(12, 9), layout="constrained")
    axes = figure.subplots(2, 2)
    for run in results:
        _cdf(axes[0, 0], run["label"], [value for value in run["ttfts"] if value is not None])
        _cdf(axes[0, 1], run["label"], [gap for gaps in run["itls"] for gap in gaps])
        finished = zip(run["latencies"], run["endings"], strict=True)
        _cdf(axes[1, 0], run["label"], [value for value, ending in finished if ending == Ending.OK])
    _saturation(axes[1, 1], results)
    for axis, title in zip(axes.flat, (*LATENCY_NAMES, "Saturation"), strict=True):
        axis.set(title=title)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize="small")
            axis.set_xlim(left=0.0)  # after all lines are drawn, which set the right end
    figure.savefig(path, dpi=110)


def _cdf(axis: Axes, label: str, seconds: Sequence[float]) -> None:
    if seconds:
        ordered = 1e3 * np.sort(np.array(seconds))
        axis.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), label=label, drawstyle="steps-post")
        axis.set(xlabel="ms", ylabel="share of requests or gaps")


def _saturation(axis: Axes, results: Sequence[dict[str, Any]]) -> None:
    throughput = [run["output_throughput"] for run in results]
    for percentile in (50, 95, 99):
        values = [run[f"p{percentile}_ttft_ms"] for run in results]
        points = [point for point in zip(throughput, values, strict=True) if point[1] is not None]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", label=f"TTFT p{percentile}")
    for run in results:
        if run["median_ttft_ms"] is not None:
            point = (run["output_throughput"], run["median_ttft_ms"])
            axis.annotate(run["label"], point, textcoords="offset points", xytext=(4, 4), fontsize="x-small")
    axis.set(xlabel="completion tokens/s", ylabel="ms", ylim=(0, None))


def write(results: Sequence[dict[str, Any]], directory: Path) -> list[Path]:
    """Write results, table and pictures into `directory`, created if missing; return the paths.

    A single run is `results.json`. Several runs are `results-<label>.json` each.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for run in results:
        name = "results.json" if len(results) == 1 else f"results-{run['label'].replace(' ', '-')}.json"
        paths.append(directory / name)
        paths[-1].write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    return paths + _write_report(results, directory)


def _write_report(results: Sequence[dict[str, Any]], directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / "report.md", directory / "report.png"]
    paths[0].write_text(markdown(results), encoding="utf-8")
    plot(results, paths[1])
    return paths


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table and the pictures of stored results. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.client.report", description=main.__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="results.json files, in the order of the table")
    parser.add_argument("--out", type=Path, default=Path("results"), help="directory for report.md and report.png")
    arguments = parser.parse_args(argv)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.results]
    _write_report(runs, arguments.out)
    print(markdown(runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
