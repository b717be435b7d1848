"""Figures of a sweep, JSON-ready: each level with its confidence intervals, and the limits that they show."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from loadtest.client.report import Slo, kind_lines, latencies_ms, summarize, timed, without_details
from loadtest.measurement.benchmark_program import QUIET_CORES
from loadtest.measurement.figures import Column, number, table
from loadtest.sweep.level import Level, State
from loadtest.sweep.search import at_capacity, brackets, capacity, estimate, settled
from loadtest.sweep.server_side import limiting_factor

PERCENTILES = (50, 90, 99, 99.9)
METRICS = {"ttft": "TTFT", "itl": "ITL", "e2el": "E2E"}
BUSY_SHARE = 0.7  # of a core: above it, the client delays what it measures
_RESAMPLES = 200
_KEPT_UP = 0.97  # completed share of the requests sent: below it, the server fell behind
_CLEARLY_ABOVE = 1.1  # multiple of an overloaded rate: close to the capacity, chance decides which rate is stable
_STATES = (
    "Stable: the requests in flight do not grow, and at most 1 % are rejected or lost. Overloaded: they grow, or more "
    "are rejected or lost. Unclear: neither is certain."
)


def level_figures(level: Level, slo: Slo) -> dict[str, Any]:
    """Return the figures of one level: the keys of `vllm bench serve`, 95 % intervals, and the verdict.

    Intervals of rates are Student's t over the windows, those of percentiles a bootstrap of the windows. A percentile
    that needs more latencies than were measured is None.
    """
    run, windows = level.run(), level.windows()
    figures = summarize(run, label=f"{level.rate:.4g} per s", slo=slo, request_rate=level.rate)
    figures = without_details(figures)
    intervals: dict[str, tuple[float, float]] = {}
    rates = {
        "request_throughput": [window.requests_per_second for window in windows],
        "output_throughput": [window.tokens_per_second for window in windows],
        "request_goodput": [sum(map(slo.is_good, window.sent)) / window.duration_seconds for window in windows],
    }
    for name, values in rates.items():
        intervals[name] = estimate(values)[1:]
    groups = [latencies_ms(timed(window.sent)) for window in windows]
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
        "late_send_p99_ms": float(np.percentile(late, 99)) if late else None,
        "intervals": intervals,
    }


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
        level_figures(level, slo) | {"state": states[level.rate], "measured_state": level.state}
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


def with_margin(row: Mapping[str, Any], name: str) -> str:
    """Return a figure with the half-width of its confidence interval."""
    low, high = row["intervals"].get(name, (None, None))
    return number(row[name]) + ("" if low is None or math.isinf(high) else f" ± {number((high - low) / 2)}")


def has_objectives(sweep: Mapping[str, Any]) -> bool:
    """Return True if objectives were given. The default limit of failed requests does not count."""
    return any(value is not None for name, value in sweep["slo"].items() if name != "max_failed_share")


def reversal(sweep: Mapping[str, Any]) -> str | None:
    """Return a sentence if the server kept up with a rate above one that overloaded it: its speed changed."""
    behind = math.inf
    for level in sweep["levels"]:
        state, completed = level.get("measured_state", level["state"]), level["request_throughput"]
        has_kept_up = state == State.STABLE or (state == State.UNCLEAR and completed >= _KEPT_UP * level["rate"])
        if has_kept_up and level["rate"] > _CLEARLY_ABOVE * behind:
            return (
                "The speed of the server or its machine changed during the sweep: the server kept up with "
                f"{number(level['rate'])} requests/s, although {number(behind)} overloaded it. The limits are not "
                "reliable. Repeat the sweep on a quiet machine."
            )
        if state == State.OVERLOADED:
            behind = min(behind, level["rate"])
    return None


def sweep_table(sweep: Mapping[str, Any]) -> str:
    """Return the levels of a sweep as a Markdown table, with goodput if objectives were given."""
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
    columns = [each for each in _COLUMNS if each.key != "request_goodput" or has_objectives(sweep)]
    return table(columns, rows)


def findings(sweep: Mapping[str, Any]) -> list[str]:
    """Return what a sweep or a replay found, a sentence or two each; the first of a sweep names the limiting factor."""
    if "findings" in sweep:  # of a replay
        return list(sweep["findings"])
    if not sweep["levels"]:
        return ["No rate was measured."]
    stable, within = sweep["stable_rate"], sweep["slo_rate"]
    by_rate = {level["rate"]: level for level in sweep["levels"]}
    above = number(stable["lowest_above"])
    lead = f"No rate was stable, not even {above} requests/s."
    if stable["highest"] is not None:
        other = "" if stable["lowest_above"] is None else f"; {above} was {by_rate[stable['lowest_above']]['state']}"
        lead = f"Highest stable rate: {number(stable['highest'])} requests/s{other}."
    limit = "The limit is unknown, because no rate overloaded the server."
    if (served := sweep["capacity"]) is not None:
        requests, tokens = (_interval(served[name]) for name in ("requests_per_second", "tokens_per_second"))
        steady = by_rate[min(by_rate) if stable["highest"] is None else stable["highest"]]
        cause = "unknown, because the server's /metrics does not say where a request's time goes"
        if steady["client_cpu_share"] > BUSY_SHARE:
            cause = "perhaps the load test itself, because its client was busy"
        elif (factor := limiting_factor(steady)) is not None:
            cause = f"{factor} at {number(steady['rate'])} requests/s"
        limit = f"While overloaded, the server completes {requests} requests/s with {tokens} tokens/s on average."
        limit += f" The limiting factor is {cause}."
    lines = [*filter(None, [reversal(sweep)]), f"{lead} {limit}", _STATES]
    for level in [level for level in sweep["levels"] if level["state"] == State.OVERLOADED][:1]:
        signs = [f"{level['shed'] / level['num_prompts']:.0%} of the requests are rejected"] if level["shed"] else []
        if (median := level["median_e2el_ms"]) is not None:
            alone = f", {number(1e3 * sweep['alone_seconds'])} ms alone" if "alone_seconds" in sweep else ""
            signs.append(f"the median request takes {number(median)} ms{alone}")
        signs = signs or ["no request was answered"]
        lines.append(f"At {number(level['rate'])} requests/s the server is overloaded: {', '.join(signs)}.")
    if stable["highest"] is not None:
        lines += [f"At the highest stable rate, {line}." for line in kind_lines(by_rate[stable["highest"]])]
    if (knee := sweep["knee_rate"]) is not None:
        text = f"Knee: {number(knee)} requests/s, with the best ratio of throughput to end-to-end latency."
        lowest = f"The knee is at or below {number(knee)} requests/s, the lowest rate tried."
        lines.append(lowest if knee == min(by_rate) else text)
    missed = by_rate.get(within["lowest_above"], {}).get("slo_breaches")
    why = f"; {number(within['lowest_above'])} misses {', '.join(missed)}" if missed else ""
    usable, name = stable["highest"], "highest stable rate"
    if not has_objectives(sweep):
        lines.append("No objectives were given; see --slo-ttft-p95-ms.")
    else:
        usable, name = within["highest"], "highest rate that meets the objectives"
        met = f"Highest rate that meets the objectives: {number(usable)} requests/s{why}."
        lines.append(f"No measured rate met the objectives{why}." if usable is None else met)
    if usable is not None:
        rate = number(usable)
        lines.append(f"For N requests/s: N / {rate} replicas ({rate}: {name}), rounded up, plus one for failures.")
    return lines


def report_lines(sweep: Mapping[str, Any]) -> list[str]:
    """Return the warnings and then the findings as items of a Markdown list."""
    return [f"- warning: {line}" for line in warnings(sweep)] + [f"- {line}" for line in findings(sweep)]


def _interval(value: Mapping[str, float]) -> str:
    text = f"{number(value['mean'])}"
    return text if math.isinf(value["high"]) else f"{text} ({number(value['low'])}–{number(value['high'])})"


def warnings(sweep: Mapping[str, Any]) -> list[str]:
    """Return reasons to doubt the figures of a sweep, a sentence each; those that concern its client come first."""
    own = "latencies may be the client's own"
    lines = [
        f"at {number(level['rate'])} requests/s: the client used {level['client_cpu_share']:.0%} of a core; {own}"
        for level in sweep["levels"]
        if level["client_cpu_share"] > BUSY_SHARE
    ]
    if (cores := sweep.get("other_work_cores", 0.0)) > QUIET_CORES:
        lines.append(f"other processes kept {cores:.1f} cores of the client's machine busy; {own}")
    lines += filter(None, [reversal(sweep)])
    if sweep.get("interrupted"):
        lines.append("the sweep was interrupted, so its limits are not narrowed down")
    best = max(sweep["levels"], key=lambda level: level["intervals"]["request_throughput"][0], default=None)
    served = (sweep["capacity"] or {}).get("requests_per_second")
    if best is not None and served is not None and best["intervals"]["request_throughput"][0] > served["high"]:
        lines.append(
            f"at {number(best['rate'])} requests/s the server served more than while overloaded: it loses throughput "
            "under overload, or other work disturbed the measurement"
        )
    for level in sweep["levels"]:
        at = f"at {number(level['rate'])} requests/s"
        lines += [f"{at}: {count} × {kind}" for kind, count in level["failures"].items()]
    return lines
