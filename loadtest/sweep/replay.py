"""Command `kvasir loadtest replay`: send recorded traffic to a server, or a workload whose rate changes."""

import argparse
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from loadtest.client.arrivals import add_arrival_arguments, arrivals_from_arguments
from loadtest.client.canaries import Canaries
from loadtest.client.outcome import Outcome
from loadtest.client.report import Slo, kind_lines
from loadtest.client.sse_client import CompletionClient
from loadtest.client.workload import Workload
from loadtest.measurement.benchmark_program import MeasurementFailed, add_options
from loadtest.measurement.figures import number
from loadtest.sweep.figures import level_figures, report_lines, sweep_table, with_margin
from loadtest.sweep.level import Level, State
from loadtest.sweep.open_loop import OpenLoop, reach
from loadtest.sweep.server_side import limiting_factor, phases_ms, scrape
from loadtest.traces.formats import Trace, read_trace
from loadtest.traces.replay_requests import Fit, Replay, replay_of

_LEAST_WINDOWS, _MAX_WINDOWS, _PER_WINDOW = 3, 20, 5  # windows of the intervals, requests in each
_REFRESHES_PER_SECOND = 2
_SETTINGS = ("trace", "fit", "speed_up", "rate", "arrivals", "burstiness", "period_seconds", "max_requests",
             "max_seconds", "request_timeout")  # fmt: skip


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that only `kvasir loadtest replay` has to its parser."""
    text = "recorded traffic: Mooncake's JSON lines, a table of BurstGPT or Azure, or conversations as of ShareGPT"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=f"{text}; without it, --workload is sent")
    text = "requests longer than the context: cut or drop them, or scale all lengths (default: scale with hash ids)"
    parser.add_argument("--fit", choices=list(Fit), type=Fit, help=text)
    options = {
        "speed-up": (1.0, "factor by which the trace's time passes faster"),
        "rate": (None, "mean requests per second, instead of the trace's times"),
        "max-seconds": (None, "send for this many seconds at most"),
    }
    parser.add_argument("--max-requests", type=int, metavar="N", help="send this many requests at most")
    add_options(parser, options)
    add_arrival_arguments(parser.add_argument_group("arrivals, with --rate"))


def plan(arguments: argparse.Namespace, trace: Trace | None, workload: Workload) -> tuple[Replay, Iterable[float]]:
    """Return the requests to send, and the offsets in seconds from the start at which to send them."""
    most, seconds, speed_up = arguments.max_requests, arguments.max_seconds, arguments.speed_up
    if trace is None:
        planned = Replay(iter(workload), None, [])
    else:
        is_timed = arguments.rate is None and seconds is not None
        timely = [each for each in trace.requests if not is_timed or each.seconds <= seconds * speed_up]
        planned = replay_of(replace(trace, requests=timely[:most]), workload, arguments.fit)
    if arguments.rate is None and planned.offsets is not None:
        return planned, [offset / speed_up for offset in planned.offsets]
    offsets = itertools.takewhile(
        lambda offset: seconds is None or offset <= seconds, arrivals_from_arguments(arguments)
    )
    return planned, itertools.islice(offsets, most)


def replayed_level(outcomes: Sequence[Outcome]) -> Level:
    """Return the load as one level, from the first intended send to the last, in windows of equal length."""
    ended = [outcome for outcome in outcomes if outcome.end_seconds > 0.0]
    if len(ended) < 2:
        raise MeasurementFailed("fewer than two requests ended")
    intended = [outcome.intended_seconds for outcome in ended]
    began, last = min(intended) - 1e-6, max(intended) + 1e-6
    count = max(_LEAST_WINDOWS, min(_MAX_WINDOWS, len(ended) // _PER_WINDOW))
    width = (last - began) / count
    ends = [began + width * number for number in range(1, count)] + [last]
    rate = len(ended) / (last - began)
    level = Level(rate=rate, state=State.REPLAYED, warm_up=0, ends=ends, window_seconds=ends[0] - began, growth=0.0)
    level.outcomes = ended
    return level


def replay(arguments: argparse.Namespace) -> dict[str, Any]:
    """Send a trace, or a workload at --rate, to the server at --url, print the result, and return its figures."""
    if arguments.speed_up <= 0.0:
        raise ValueError("--speed-up must be above 0")
    trace = None if arguments.trace is None else read_trace(arguments.trace)
    if arguments.rate is None and (trace is None or trace.conversations):
        raise ValueError("--rate is missing, because conversations and workloads have no times")
    if trace is None and arguments.max_seconds is None and arguments.max_requests is None:
        raise ValueError("a workload has no end; give --max-seconds or --max-requests")
    slo, (target, model, workload) = Slo.from_arguments(arguments), reach(arguments)
    planned, offsets = plan(arguments, trace, workload)
    outcomes, is_interrupted = list[Outcome](), False
    with closing(CompletionClient(target, timeout_seconds=arguments.request_timeout)) as client:
        canaries = Canaries.ask(partial(client.complete, model=model), workload, arguments.canary_share)
        requests = canaries.mix(planned.requests, arguments.seed)
        load, before = OpenLoop(client, requests, model=model, seed=arguments.seed), scrape(target)
        began = time.perf_counter(), time.process_time()
        total = len(planned.offsets) if isinstance(offsets, list) and planned.offsets else arguments.max_requests
        try:
            console = Console(stderr=True)
            with Progress(console=console, transient=True, refresh_per_second=_REFRESHES_PER_SECOND) as progress:
                load.run(offsets, outcomes, partial(progress.advance, progress.add_task("requests sent", total=total)))
        except KeyboardInterrupt:
            is_interrupted = True
        level = replayed_level(outcomes)
        level.server_ms = phases_ms(before, scrape(target), level.outcomes)
    level.client_cpu_share = (time.process_time() - began[1]) / (time.perf_counter() - began[0])
    settings = {name: getattr(arguments, name) for name in _SETTINGS}
    result = {
        "kind": "replay",
        "url": target.url,
        "model_id": model,
        "interrupted": is_interrupted,
        "settings": settings | {"trace": arguments.trace and str(arguments.trace), "form": trace and trace.form},
        "workload": asdict(workload.spec) | {"canary_share": arguments.canary_share},
        "notes": list(planned.notes),
        "capacity": None,
        "knee_rate": None,
        **{name: {"highest": None, "lowest_above": None} for name in ("stable_rate", "slo_rate")},
        "slo": asdict(slo),
        "levels": [level_figures(level, slo)],
    }
    result["findings"] = replay_findings(result)
    print("\n".join(["", sweep_table(result), *report_lines(result)]))
    return result


def replay_findings(result: Mapping[str, Any]) -> list[str]:
    """Return what a replay found, a sentence each."""
    (level,), settings = result["levels"], result["settings"]
    name = f"{settings['trace']} ({settings['form']})" if settings["trace"] else result["workload"]["kind"]
    faster = "" if settings["speed_up"] == 1.0 else f", {settings['speed_up']:g} times as fast"
    counts = f"{level['completed']:,} ok, {level['shed']:,} rejected, {level['failed']:,} failed"
    lines = [f"Replayed {level['sent']:,} requests of {name}{faster}: {number(level['rate'])} requests/s; {counts}."]
    lines += [f"Differs from the trace: {note}." for note in result["notes"]]
    limits = ("ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms")
    has_limits = any(result["slo"][name] is not None for name in limits)
    share = level["request_goodput"] * level["duration"] / level["sent"]
    within = "of all requests within the objectives" if has_limits else "without objectives: all ok requests"
    lines.append(f"Goodput: {with_margin(level, 'request_goodput')} requests/s, {share:.1%} {within}.")
    lines += [f"Of kind {line}." for line in kind_lines(level)]
    lines += [f"Missed objective: {breach}." for breach in level["slo_breaches"]]
    if (factor := limiting_factor(level)) is not None:
        lines.append(f"Where the time goes: {factor}.")
    return lines
