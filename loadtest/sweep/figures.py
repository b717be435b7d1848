"""Figures of a sweep, JSON-ready: each level with its confidence intervals, and the limits that they show."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from loadtest.client.outcome import Ending, Outcome
from loadtest.client.report import Slo, latencies_ms, summarize
from loadtest.measurement.benchmark_program import QUIET_CORES
from loadtest.measurement.figures import Column, table
from loadtest.sweep.level import Level, State
from loadtest.sweep.search import at_capacity, brackets, capacity, estimate, settled
from loadtest.sweep.server_side import limiting_factor

PERCENTILES = (50, 90, 99, 99.9)
METRICS = {"ttft": "TTFT", "itl": "ITL", "e2el": "E2E"}
BUSY_SHARE = 0.7  # of a core: above it, the client delays what it measures
_RESAMPLES = 200


def level_figures(level: Level, slo: Slo) -> dict[str, Any]:
    """Return the figures of one level: the keys of `vllm bench serve`, 95 % intervals, and the verdict.

    Intervals of rates are Student's t over the windows, those of percentiles a bootstrap of the windows. A percentile
    that needs more latencies than were measured is None.
    """
    run, windows = level.run(), level.windows()
    figures = summarize(run, label=f"{level.rate:.4g} per s", slo=slo, request_rate=level.rate)
    figures = {name: value for name, value in figures.items() if not isinstance(value, list) or name == "slo_breaches"}
    intervals: dict[str, tuple[float, float]] = {}
    rates = {
        "request_throughput": [window.requests_per_second for window in windows],
        "output_throughput": [window.tokens_per_second for window in windows],
        "request_goodput": [sum(map(slo.is_good, window.sent)) / window.duration_seconds for window in windows],
    }
    for name, values in rates.items():
        intervals[name] = estimate(values)[1:]
    groups = [latencies_ms([each for each in window.sent if each.ending is Ending.OK]) for window in windows]
    for metric in METRICS:
        parts = [np.array(group[metric]) for group in groups if group[metric]]
        pooled = np.concatenate([[], *parts])
        enough = [percentile for percentile in PERCENTILES if len(pooled) * (100 - percentile) >= 100]
        figures |= {f"p{percentile:g}_{metric}_ms": None for percentile in PERCENTILES}
        for percentile, low, high in zip(enough, *_bootstrap(parts, enough), strict=True):
            figures[f"p{percentile:g}_{metric}_ms"] = float(np.percentile(pooled, percentile))
            intervals[f"p{percentile:g}_{metric}_ms"] = (low, high)
    late = [1e3 * (outcome.sent_seconds - outcome.intended_seconds) for outcome in run.sent]
    return figures | {
        "rate": level.rate,
        "state": level.state,
        "growth_share": level.growth,
        "warm_up_seconds": level.warm_up * level.window_seconds,
        "window_seconds": level.window_seconds,
        "num_windows": len(windows),
        "server_ms": level.server_ms,
        "kinds": kind_figures(run.sent, slo),
        "late_send_p99_ms": float(np.percentile(late, 99)) if late else None,
        "intervals": intervals,
    }


def kind_figures(outcomes: Sequence[Outcome], slo: Slo) -> dict[str, dict[str, Any]]:
    """Return the figures of each kind of requests: counts by result, requests within the objectives, latencies."""
    rows: dict[str, dict[str, Any]] = {}
    for kind in sorted({outcome.kind for outcome in outcomes}):
        own = [outcome for outcome in outcomes if outcome.kind == kind]
        done = [outcome for outcome in own if outcome.ending is Ending.OK]
        counts = {"sent": len(own), "completed": len(done), "failed": sum(each.ending.is_failure for each in own)}
        rows[kind] = counts | {"good": sum(map(slo.is_good, own))}
        for metric, values in latencies_ms(done).items():
            texts = ((f"p{share}_{metric}_ms", share) for share in (50, 95))
            rows[kind] |= {name: float(np.percentile(values, share)) if values else None for name, share in texts}
    return rows


def _bootstrap(parts: Sequence[np.ndarray[Any, Any]], percentiles: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the lower and upper 95 % bounds of percentiles of the pooled parts, by resampling whole parts."""
    if not percentiles:
        return [], []
    rng = np.random.default_rng(0)
    found = [
        np.percentile(
            np.concatenate([parts[index] for index in rng.integers(len(parts), size=len(parts))]), percentiles
        )
        for _ in range(_RESAMPLES)
    ]
    low, high = np.nanpercentile(found, (2.5, 97.5), axis=0)
    return list(map(float, low)), list(map(float, high))


def sweep_figures(levels: Sequence[Level], slo: Slo) -> dict[str, Any]:
    """Return the figures of a sweep: levels by rate, capacity, bounds of the highest stable rate, knee, SLO rate.

    The knee is the stable rate with the greatest power, throughput over median E2E latency (Kleinrock, 1979).
    slo_rate: highest stable rate that meets the objectives; None if no rate does.
    """
    states = settled(levels)
    rows = [
        level_figures(level, slo) | {"state": states[level.rate]}
        for level in sorted(levels, key=lambda each: each.rate)
    ]
    limits = [[rate if 0.0 < rate < float("inf") else None for rate in pair] for pair in brackets(levels)]
    steady = [row for row in rows if row["state"] is State.STABLE and row["median_e2el_ms"]]
    knee = max(steady, key=lambda row: row["request_throughput"] / row["median_e2el_ms"], default=None)
    served = capacity(levels)
    tokens = [window.tokens_per_second for level in at_capacity(levels) for window in level.windows()]
    return {
        "capacity": served
        and {"requests_per_second": served._asdict(), "tokens_per_second": estimate(tokens)._asdict()},
        "stable_rate": dict(zip(("highest", "lowest_above"), limits[0], strict=True)),
        "slo_rate": dict(zip(("highest", "lowest_above"), limits[1], strict=True)),
        "knee_rate": knee and knee["rate"],
        "slo": asdict(slo),
        "levels": rows,
    }


_COLUMNS = (
    Column("requests/s", "rate", ".4g"),
    Column("state", "state"),
    Column("ok/s", "request_throughput"),
    Column("tokens/s", "output_throughput"),
    Column("goodput/s", "request_goodput"),
    *(Column(f"{name} p50/p90/p99/p99.9 ms", metric) for metric, name in METRICS.items()),
    Column("failed", "failed"),
    Column("429", "shed"),
    Column("client CPU", "client_cpu_share", ".0%"),
)


def number(value: float | None) -> str:
    """Return a figure with three digits, at most four of them decimals; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{round(value, 4):.3g}"


def with_margin(row: Mapping[str, Any], name: str) -> str:
    """Return a figure with the half-width of its confidence interval."""
    low, high = row["intervals"].get(name, (None, None))
    return number(row[name]) + ("" if low is None or math.isinf(high) else f" ± {number((high - low) / 2)}")


def sweep_table(sweep: Mapping[str, Any]) -> str:
    """Return the levels of a sweep as a Markdown table."""
    rows = []
    for level in sweep["levels"]:
        texts = {
            name: with_margin(level, name) for name in ("request_throughput", "output_throughput", "request_goodput")
        }
        texts |= {
            metric: " / ".join(number(level[f"p{percentile:g}_{metric}_ms"]) for percentile in PERCENTILES)
            for metric in METRICS
        }
        rows.append(level | texts)
    return table(_COLUMNS, rows)


def findings(sweep: Mapping[str, Any]) -> list[str]:
    """Return what a sweep or a replay found, a sentence or two each; the first of a sweep names the limiting factor."""
    if "findings" in sweep:  # of a replay
        return list(sweep["findings"])
    if not sweep["levels"]:
        return ["No rate was measured."]
    stable, within = sweep["stable_rate"], sweep["slo_rate"]
    by_rate = {level["rate"]: level for level in sweep["levels"]}
    lines = ["The limit is unknown, because no rate overloaded the server."]
    if (served := sweep["capacity"]) is not None:
        requests, tokens = (_interval(served[name]) for name in ("requests_per_second", "tokens_per_second"))
        steady = by_rate[min(by_rate) if stable["highest"] is None else stable["highest"]]
        cause = "unknown, because the server's /metrics does not say where a request's time goes"
        if steady["client_cpu_share"] > BUSY_SHARE:
            cause = "perhaps the load test itself, because its client was busy"
        elif (factor := limiting_factor(steady)) is not None:
            cause = f"{factor} at {number(steady['rate'])} requests/s"
        limit = f"The server completes at most {requests} requests/s with {tokens} tokens/s."
        lines = [f"{limit} The limiting factor is {cause}."]
    for level in [level for level in sweep["levels"] if level["state"] == State.OVERLOADED][:1]:
        signs = [f"{level['shed'] / level['num_prompts']:.0%} of the requests are rejected"] if level["shed"] else []
        if (median := level["median_e2el_ms"]) is not None:
            alone = f", {number(1e3 * sweep['alone_seconds'])} ms alone" if "alone_seconds" in sweep else ""
            signs.append(f"the median request takes {number(median)} ms{alone}")
        signs = signs or ["no request was answered"]
        lines.append(f"At {number(level['rate'])} requests/s the server is overloaded: {', '.join(signs)}.")
    if stable["highest"] is None:
        lines.append(f"No rate was stable, not even {number(stable['lowest_above'])} requests/s.")
    else:
        above = "" if stable["lowest_above"] is None else f"; {number(stable['lowest_above'])} was not"
        lines.append(f"Highest stable rate: {number(stable['highest'])} requests/s{above}.")
        lines.append(
            f"Knee: {number(sweep['knee_rate'])} requests/s, with the best ratio of throughput to E2E latency."
        )
    limits = [name for name, value in sweep["slo"].items() if value is not None and name != "max_failed_share"]
    missed = by_rate.get(within["lowest_above"], {}).get("slo_breaches")
    why = f"; {number(within['lowest_above'])} misses {', '.join(missed)}" if missed else ""
    if not limits:
        lines.append("Objectives: none given, so goodput counts all ok requests; see --slo-ttft-p95-ms.")
    elif within["highest"] is None:
        lines.append(f"No measured rate met the objectives{why}.")
    else:
        lines.append(f"Highest rate that meets the objectives: {number(within['highest'])} requests/s{why}.")
    return lines


def _interval(value: Mapping[str, float]) -> str:
    text = f"{number(value['mean'])}"
    return text if math.isinf(value["high"]) else f"{text} ({number(value['low'])}–{number(value['high'])})"


def warnings(sweep: Mapping[str, Any]) -> list[str]:
    """Return reasons to doubt the figures of a sweep, a sentence each."""
    lines = ["the sweep was interrupted, so its limits are not narrowed down"] if sweep.get("interrupted") else []
    best = max(sweep["levels"], key=lambda level: level["intervals"]["request_throughput"][0], default=None)
    served = (sweep["capacity"] or {}).get("requests_per_second")
    if best is not None and served is not None and best["intervals"]["request_throughput"][0] > served["high"]:
        lines.append(
            f"at {number(best['rate'])} requests/s the server served more than while overloaded: it loses throughput "
            "under overload, or other work disturbed the measurement"
        )
    if sweep.get("other_work_cores", 0.0) > QUIET_CORES:
        lines.append(f"other processes kept {sweep['other_work_cores']:.1f} cores of the client's machine busy")
    for level in sweep["levels"]:
        at = f"at {number(level['rate'])} requests/s"
        if level["client_cpu_share"] > BUSY_SHARE:
            lines.append(
                f"{at}: the client used {level['client_cpu_share']:.0%} of a core and delayed what it measures"
            )
        lines += [f"{at}: {count} × {kind}" for kind, count in level["failures"].items()]
    return lines
