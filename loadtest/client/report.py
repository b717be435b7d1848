"""Service level objectives and JSON summary of a load test, with the keys of `vllm bench serve`; Markdown table.

    python -m loadtest.client.report results/*.json

prints the summaries in these files as one table. vLLM counts latencies from the actual send of a request, Kvasir's load
test from the intended send.
"""

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from loadtest.client.outcome import ClientKind, Ending, LoadRun, Outcome
from loadtest.client.timeline import timeline
from loadtest.measurement.benchmark_program import add_options, described, options_of
from loadtest.measurement.figures import Column, number, percentiles, table


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Service level objectives of a load test; None: no limit. A latency that was never measured misses its limit."""

    ttft_p95_ms: float | None = described(None, "maximum 95th percentile of time to first token, ms")
    tpot_p95_ms: float | None = described(None, "maximum 95th percentile of time per output token, ms")
    itl_p95_ms: float | None = described(None, "maximum 95th percentile of inter-token latency, ms")
    e2e_p95_ms: float | None = described(None, "maximum 95th percentile of end-to-end latency, ms")
    max_failed_share: float | None = described(0.0, "maximum share of requests that fail, without rejections with 429")
    max_shed_share: float | None = described(None, "maximum share of requests rejected with 429")
    min_output_throughput: float | None = described(None, "minimum completion tokens/s")

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """Return the objectives of the parsed `--slo-...` options."""
        return cls(**{name: getattr(arguments, f"slo_{name}") for name in options_of(cls)})

    def is_good(self, outcome: Outcome) -> bool:
        """Return True if a request counts as goodput, as in vLLM: a success within the limits of TTFT, TPOT and E2E.

        A latency that the request does not have, such as TPOT for one token, exceeds no limit. Nor do those of a slow
        reader, which are the client's.
        """
        limits = (self.ttft_p95_ms, self.tpot_p95_ms, self.e2e_p95_ms)
        seconds = (outcome.ttft_seconds, outcome.tpot_seconds, outcome.e2e_seconds)
        pairs = zip(limits, seconds, strict=True)
        is_kept = all(limit is None or value is None or 1e3 * value <= limit for limit, value in pairs)
        return outcome.ending is Ending.OK and (is_kept or outcome.client is ClientKind.SLOW)

    def breaches(self, outcomes: Sequence[Outcome], tokens_per_second: float) -> list[str]:
        """Return a line of text for each objective that the load missed, with the measured value and the limit.

        For a load without requests, the only line is "no request was sent", even without limits.
        """
        if not outcomes:
            return ["no request was sent"]
        lines = []
        for name, values in zip(("ttft", "tpot", "itl", "e2e"), latencies_ms(timed(outcomes)).values(), strict=True):
            limit = getattr(self, f"{name}_p95_ms")
            p95 = float(np.percentile(values, 95)) if values else None
            if limit is not None and (p95 is None or p95 > limit):
                measured = "nothing measured" if p95 is None else f"{p95:.1f} ms"
                lines.append(f"{name.upper()} p95: {measured}, limit {limit:g} ms")
        shares = {
            "failed": (sum(outcome.ending.is_failure for outcome in outcomes), self.max_failed_share),
            "shed": (sum(outcome.ending is Ending.SHED for outcome in outcomes), self.max_shed_share),
        }
        for name, (count, limit) in shares.items():
            if limit is not None and count / len(outcomes) > limit:
                lines.append(f"{name}: {count / len(outcomes):.2%} of the requests sent, limit {limit:.2%}")
        if self.min_output_throughput is not None and tokens_per_second < self.min_output_throughput:
            lines.append(f"output throughput: {tokens_per_second:.1f} tokens/s, limit {self.min_output_throughput:g}")
        return lines


def add_slo_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add one `--slo-...` command-line option per objective to a parser."""
    add_options(parser, {f"slo_{name}": option for name, option in options_of(Slo).items()})


def timed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the successful requests whose latencies are the server's: those of clients that read at once."""
    return [each for each in outcomes if each.ending is Ending.OK and each.client is not ClientKind.SLOW]


def latencies_ms(done: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return the latencies of successful requests in milliseconds, by vLLM's names: ttft, tpot, itl and e2el."""
    seconds: dict[str, Sequence[float | None]] = {
        "ttft": [outcome.ttft_seconds for outcome in done],
        "tpot": [outcome.tpot_seconds for outcome in done],
        "itl": [gap for outcome in done for gap in outcome.itl_seconds],
        "e2el": [outcome.e2e_seconds for outcome in done],
    }
    return {name: [1e3 * value for value in values if value is not None] for name, values in seconds.items()}


def summarize(
    run: LoadRun, *, label: str, slo: Slo, request_rate: float | None = None, max_concurrency: int | None = None
) -> dict[str, Any]:
    """Return the summary of one load test, JSON-ready: the keys of `vllm bench serve`, and a few more.

    Requests whose intended send is outside the run's time, `began_seconds` to `ended_seconds`, are left out.
    """
    outcomes, seconds = sorted(run.sent, key=lambda outcome: outcome.index), run.duration_seconds
    done = [outcome for outcome in outcomes if outcome.ending is Ending.OK]
    endings = Counter(outcome.ending for outcome in outcomes)
    failures = Counter(f"{o.ending.value}: {o.detail}"[:120] for o in outcomes if o.ending.is_failure)
    input_tokens = sum(outcome.prompt_tokens for outcome in done)
    output_tokens = sum(outcome.completion_tokens for outcome in done)
    chunks = np.array([moment for outcome in done for moment in outcome.chunk_seconds])
    tokens_by_second = np.bincount((chunks - chunks.min()).astype(int)) if chunks.size else np.zeros(1)
    # A request that ends when another is sent is not concurrent with it: (time, -1) sorts before (time, +1).
    moves = sorted(move for o in outcomes for move in ((o.sent_seconds, 1), (o.end_seconds, -1)))
    result: dict[str, Any] = {
        "label": label,
        "num_prompts": len(outcomes),
        "request_rate": "inf" if request_rate is None else request_rate,
        "burstiness": 1.0,
        "max_concurrency": max_concurrency,
        "duration": seconds,
        "completed": len(done),
        "failed": failures.total(),
        "sent": len(outcomes),
        "shed": endings[Ending.SHED],
        "cancelled": endings[Ending.CANCELLED],
        "failures": dict(failures.most_common()),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": run.requests_per_second,
        "request_goodput": sum(map(slo.is_good, outcomes)) / seconds,
        "output_throughput": run.tokens_per_second,
        "total_token_throughput": input_tokens / seconds + run.tokens_per_second,
        "max_output_tokens_per_s": float(tokens_by_second.max()),
        "max_concurrent_requests": max(itertools.accumulate(change for _, change in moves), default=0),
        "client_cpu_share": run.client_cpu_share,
        "slo_breaches": slo.breaches(outcomes, run.tokens_per_second),
    }
    statistics: dict[str, Callable[[Sequence[float]], Any]] = {"mean": np.mean, "median": np.median, "std": np.std}
    for metric, values in latencies_ms(timed(outcomes)).items():
        found = {name: float(statistic(values)) if values else None for name, statistic in statistics.items()}
        found |= percentiles(values, (50, 90, 95, 99))
        result |= {f"{name}_{metric}_ms": value for name, value in found.items()}
    return result | {"kinds": kind_figures(outcomes, slo), "timeline": timeline(outcomes)} | _details(outcomes)


def kind_figures(outcomes: Sequence[Outcome], slo: Slo) -> dict[str, dict[str, Any]]:
    """Return the figures of each kind of requests, and of slow readers: counts by result, latencies."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault("slow reader" if outcome.client is ClientKind.SLOW else outcome.kind, []).append(outcome)
    rows: dict[str, dict[str, Any]] = {}
    for kind, own in sorted(groups.items()):
        done = [outcome for outcome in own if outcome.ending is Ending.OK]
        counts = {"sent": len(own), "completed": len(done), "failed": sum(each.ending.is_failure for each in own)}
        rows[kind] = counts | {"good": sum(map(slo.is_good, own))}
        for metric, values in latencies_ms(done).items():
            rows[kind] |= {f"{name}_{metric}_ms": value for name, value in percentiles(values, (50, 95)).items()}
    return rows


def kind_lines(run: Mapping[str, Any]) -> list[str]:
    """Return a line on each kind of requests of a load; none for a single kind."""
    lines = []
    for kind, row in run["kinds"].items() if len(run["kinds"]) > 1 else ():
        counts = ", ".join(f"{row[name]:,} {text}" for name, text in _COUNTS.items())
        times = (
            f"{text} p50/p95 {' / '.join(number(row[f'p{share}_{name}_ms']) for share in (50, 95))} ms"
            for name, text in (("ttft", "TTFT"), ("e2el", "E2E"))
        )
        lines.append(f"{kind}: {counts}; {', '.join(times)}")
    return lines


_COUNTS = {"sent": "sent", "completed": "ok", "failed": "failed", "good": "good"}


def _details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Return lists with an item per request, by vLLM's names and a few more."""
    start = min((outcome.intended_seconds for outcome in outcomes), default=0.0)
    return {
        "input_lens": [o.prompt_tokens for o in outcomes],
        "output_lens": [o.completion_tokens for o in outcomes],
        "ttfts": [o.ttft_seconds for o in outcomes],
        "itls": [list(o.itl_seconds) for o in outcomes],
        "latencies": [o.e2e_seconds for o in outcomes],
        "start_times": [o.intended_seconds - start for o in outcomes],
        "queue_times": [o.sent_seconds - o.intended_seconds for o in outcomes],
        "errors": [o.detail for o in outcomes],
        "endings": [o.ending.value for o in outcomes],
        "clients": [o.client.value for o in outcomes],
        "chunk_times": [[moment - start for moment in o.chunk_seconds] for o in outcomes],
    }


def without_details(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary without its lists of one item per request."""
    kept = ("slo_breaches", "timeline")
    return {name: value for name, value in result.items() if not isinstance(value, list) or name in kept}


COLUMNS = (
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
    Column("TPOT p50/p95/p99 ms", "tpot"),
    Column("E2E p50/p95/p99 ms", "e2el"),
    Column("client CPU", "client_cpu_share", ".0%"),
)


def percentile_texts(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells with several percentiles of one load, by metric."""
    texts = {}
    for metric in ("ttft", "itl", "tpot", "e2el"):
        values = [run[f"p{percentile}_{metric}_ms"] for percentile in (50, 95, 99)]
        texts[metric] = " / ".join("–" if value is None else f"{value:.1f}" for value in values)
    return texts


def notes(run: Mapping[str, Any]) -> list[str]:
    """Return kinds of requests, failures, missed objectives and warnings of one load, a line each."""
    lines = kind_lines(run) + [f"{count} × {kind}" for kind, count in run["failures"].items()]
    lines += [f"broken objective: {breach}" for breach in run["slo_breaches"]]
    if (share := run["client_cpu_share"]) > 0.7:  # of a core: the client itself delays what it measures
        lines.append(f"the load test itself used {share:.0%} of a core; do not trust the latencies")
    return [f"{run['label']}: {line}" for line in lines]


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with a row per load test; below it failures, missed objectives and warnings."""
    lines = [f"- {line}" for run in results for line in notes(run)]
    return "\n".join([table(COLUMNS, [{**run, **percentile_texts(run)} for run in results]), *lines])


if __name__ == "__main__":
    print(markdown([json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]))
