"""Command `kvasir loadtest`: sweep a server with OpenAI's API to its limits, or replay recorded traffic on it."""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import gevent
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.client.canaries import Canaries
from loadtest.client.outcome import Ending
from loadtest.client.report import Slo, add_slo_arguments
from loadtest.client.requests import LoadRequest
from loadtest.client.sse_client import CompletionClient, add_target_arguments
from loadtest.client.workload import add_workload_arguments
from loadtest.measurement.benchmark_program import (
    CommandParser,
    MeasurementFailed,
    add_options,
    new_run,
    read_arguments,
    run_benchmark,
)
from loadtest.measurement.figures import number
from loadtest.sweep.compare import Verdict, compare, comparison_text
from loadtest.sweep.figures import report_lines, sweep_figures, sweep_table
from loadtest.sweep.level import Level, Load, WindowPlan, measure
from loadtest.sweep.open_loop import OpenLoop, reach
from loadtest.sweep.page import write_report
from loadtest.sweep.replay import add_replay_arguments, replay
from loadtest.sweep.search import levels_left, next_rate, settled
from loadtest.sweep.server_side import phases_ms, scrape

_NUM_PROBES, _MAX_IDLE_SECONDS = 3, 60.0
_OPTIONS: dict[str, tuple[Any, ...]] = {
    "precision": (0.03, "end when the highest good rate and the lowest other rate differ by less than this share"),
    "windows": (8, "windows to count at each rate, after the warm-up; at most three times as many are measured"),
    "window-seconds": (5.0, "length of a window in seconds; at least the latency of a request alone"),
}


class SweepProgress:
    """Progress bar of a sweep on a terminal; a line per finished rate otherwise."""

    def __init__(self, plan: WindowPlan, precision: float, num_rates: int) -> None:
        self._plan, self._precision, self._num_rates = plan, precision, num_rates
        self._console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._progress = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
        self._task = self._progress.add_task("", total=None, left="")
        self._seconds: list[float] = []

    def __enter__(self) -> "SweepProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, levels: Sequence[Level], rate: float) -> None:
        """Show that a rate is measured now, and how long the rest takes if its levels take as long as the others."""
        self._began = time.monotonic()
        count = max(1, self._num_rates - len(levels) if self._num_rates else levels_left(levels, self._precision))
        usual = self._plan.seconds * (self._plan.num_windows + 2)
        seconds = count * (statistics.fmean(self._seconds) if self._seconds else usual)
        most = count * self._plan.seconds * (self._plan.max_windows + self._plan.num_windows)
        self._progress.update(
            self._task,
            description=f"{number(rate)} requests/s",
            total=(len(levels) + count) * self._plan.max_windows,
            completed=len(levels) * self._plan.max_windows,
            left=f"about {_minutes(seconds)} left, at most {_minutes(most)}",
            refresh=True,
        )

    def on_window(self, number: int) -> None:
        """Show that a window of the current rate is over."""
        self._progress.advance(self._task)
        self._progress.refresh()

    def end(self, levels: Sequence[Level]) -> None:
        """Print the result of the last measured rate."""
        self._seconds.append(time.monotonic() - self._began)
        level = levels[-1]
        run = level.run()
        text = (
            f"{number(level.rate):>7} requests/s: {settled(levels)[level.rate]}, {number(run.requests_per_second)} ok/s"
        )
        self._console.print(f"{text}, {number(run.tokens_per_second)} tokens/s, {self._seconds[-1]:.0f} s")


def _minutes(seconds: float) -> str:
    return f"{seconds // 60:.0f}:{seconds % 60:02.0f}"


def probe(client: CompletionClient, requests: Sequence[LoadRequest], model: str) -> float:
    """Return the median E2E latency of requests that are sent one after the other, in seconds.

    Raises MeasurementFailed if a request fails.
    """
    outcomes = [client.complete(request.plain(), model=model) for request in requests]
    for outcome in outcomes:
        if outcome.ending.is_failure:
            raise MeasurementFailed(f"the only request in flight failed: {outcome.ending}: {outcome.detail}")
    return statistics.median(outcome.e2e_seconds for outcome in outcomes)


def wait_idle(client: CompletionClient, requests: Iterator[LoadRequest], model: str, alone: float) -> None:
    """Send requests one by one until one is served about as fast as alone, at most for a minute.

    A server may still compute for clients that have gone, or keep capacity for rejected clients.
    """
    end = time.monotonic() + _MAX_IDLE_SECONDS
    while time.monotonic() < end:
        outcome = client.complete(next(requests).plain(), model=model)
        if outcome.ending is Ending.OK and outcome.e2e_seconds < 2 * alone:
            return
        gevent.sleep(alone)


def upcoming(arguments: argparse.Namespace, levels: Sequence[Level], first: float) -> float | None:
    """Return the rate to measure next, from `--rates` or by the search; None at the end."""
    if arguments.rates is not None:
        return next(iter(arguments.rates[len(levels) :]), None)
    return next_rate(levels, first=first, precision=arguments.precision)


def sweep(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sweep the server at `--url`, print the result, and return its figures. An interrupted sweep keeps its levels."""
    least = {"precision": 0.001, "windows": 3, "window_seconds": 0.001}
    for name, value in least.items():
        if getattr(arguments, name) < value:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {value:g}")
    if min(arguments.rates or [1.0]) <= 0.0:
        raise ValueError("--rates must be above 0")
    slo, (target, model, workload) = Slo.from_arguments(arguments), reach(arguments)
    requests = iter(workload)
    levels, is_interrupted = list[Level](), False
    with closing(CompletionClient(target, timeout_seconds=arguments.request_timeout)) as client:
        alone = probe(client, list(itertools.islice(requests, _NUM_PROBES)), model)
        canaries = Canaries.ask(partial(client.complete, model=model), workload, arguments.canary_share)
        plan = WindowPlan(seconds=max(arguments.window_seconds, alone), num_windows=arguments.windows)
        mixed = canaries.mix(requests, arguments.seed)
        load: Load = OpenLoop(client, mixed, model=model, seed=arguments.seed)
        try:
            with SweepProgress(plan, arguments.precision, len(arguments.rates or [])) as progress:
                while (rate := upcoming(arguments, levels, first=1 / alone)) is not None:
                    progress.begin(levels, rate)
                    wait_idle(client, requests, model, alone)
                    before = scrape(target)
                    levels.append(measure(load, rate, plan, slo, progress.on_window))
                    levels[-1].server_ms = phases_ms(before, scrape(target), levels[-1].outcomes)
                    progress.end(levels)
        except KeyboardInterrupt:
            is_interrupted = True
    figures = sweep_figures(levels, slo) | {"alone_seconds": alone}
    print("\n".join(["", sweep_table(figures), *report_lines(figures)]))
    settings = {name: getattr(arguments, name.replace("-", "_")) for name in (*_OPTIONS, "request-timeout")}
    return {
        "kind": "sweep",
        "url": target.url,
        "model_id": model,
        "interrupted": is_interrupted,
        "settings": settings,
        "workload": asdict(workload.spec) | {"canary_share": arguments.canary_share},
    } | figures


def run_compare(arguments: argparse.Namespace) -> int:
    """Print the changes between two sweeps, with 95 % intervals. Return 1 if a figure is worse beyond the tolerance."""
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (arguments.before, arguments.after))
    rows = compare(before, after, arguments.tolerance)
    print(comparison_text(before, after, rows))
    return int(any(row["verdict"] is Verdict.REGRESSION for row in rows))


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of both ways to measure a server to a parser."""
    parser.add_argument("--url", required=True, help="URL of the server, for example http://127.0.0.1:8000")
    add_target_arguments(parser)
    text = "JSON file, or a directory in which each run gets one; the report is written beside it, as .html and .md"
    parser.add_argument("--out", type=Path, metavar="PATH", help=text)
    add_workload_arguments(parser.add_argument_group("workload"))
    add_slo_arguments(parser.add_argument_group("objectives"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvasir loadtest`, and return the exit code: 0; 1 failed or interrupted; 2 invalid arguments."""
    parser = CommandParser(
        prog="kvasir loadtest",
        description="Find the limits of a running server with OpenAI's API, or replay recorded traffic on it.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    text = "measure the server at rates from idle to overload"
    sweeping = commands.add_parser("sweep", help=text, description=sweep.__doc__)
    text = "measure these rates, in requests per second, instead of searching; equal rates can be compared"
    sweeping.add_argument("--rates", type=float, nargs="+", metavar="RATE", help=text)
    add_options(sweeping, _OPTIONS)
    text = "send recorded traffic, or a workload whose rate changes"
    replaying = commands.add_parser("replay", help=text, description=replay.__doc__)
    add_replay_arguments(replaying)
    for command in (sweeping, replaying):
        _add_common_arguments(command)
    text = "compare the results of two sweeps or replays"
    comparing = commands.add_parser("compare", help=text, description=run_compare.__doc__)
    comparing.add_argument("before", type=Path, help="JSON file of a sweep")
    comparing.add_argument("after", type=Path, help="JSON file of a later sweep")
    add_options(comparing, {"tolerance": (0.05, "change that is no regression, as a share")})
    arguments = read_arguments(parser, argv)
    if arguments.command is None:
        parser.error("name a command: sweep, replay, compare")
    if arguments.command == "compare":
        return run_compare(arguments)
    command, measured = (sweeping, sweep) if arguments.command == "sweep" else (replaying, replay)
    arguments.given.remove(arguments.command)  # the program's name has it already
    if arguments.out is not None and arguments.out.suffix != ".json":
        arguments.out = new_run(arguments.out, arguments.command)
    return run_benchmark(command, arguments, lambda: measured(arguments), prints_json=False, report=write_report)


if __name__ == "__main__":
    raise SystemExit(main())
