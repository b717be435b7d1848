"""Load test as locust users, headless or with locust's web page, with an exit code from the objectives.

Request types in locust's table: E2E is a whole request, or SHED after a 429 (not an error), or CANCEL if the client
disconnected as planned, or SLOW if it read slowly. Only these count in locust's sums. A stream of any other client also
has one TTFT, TPOT, ITL (median of its gaps) and ITL P99 (their 99th percentile). Workers send their outcomes to the
master, so its report is that of one process.
"""

import argparse
import itertools
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import gevent
import locust.stats
import msgspec
import numpy as np
from locust import User, constant, events, task
from locust.argument_parser import LocustArgumentParser, get_parser
from locust.env import Environment
from locust.exception import StopUser
from locust.rpc import Message
from locust.runners import MasterRunner, Runner, WorkerRunner
from locust.web import WebUI

from loadtest.client import report, web_charts
from loadtest.client.arrivals import add_arrival_arguments, arrivals_from_arguments
from loadtest.client.canaries import Canaries
from loadtest.client.outcome import ClientKind, Ending, LoadRun, Outcome
from loadtest.client.sse_client import CompletionClient, Target, add_target_arguments, discover
from loadtest.client.timeline import Timeline
from loadtest.client.workload import Turns, add_workload_arguments, spec_from_arguments
from loadtest.measurement.benchmark_program import (
    MeasurementFailed,
    add_options,
    new_run,
    options_of,
    provenance,
    write_result,
)

T = TypeVar("T")
log = logging.getLogger("loadtest")
_MESSAGE, _MESSAGE_SECONDS = "outcomes", 1.0  # from workers to the master


class LoadSession:
    """State that the users of one run share in this process: HTTP client, requests, and outcomes of requests.

    Of n workers, each has every n-th request and arrival, so that together they send what one process sends.
    """

    def __init__(self, host: str, options: argparse.Namespace, runner: Runner) -> None:
        target = Target.parse(host, options.ca_file)
        discovered, workload = discover(target, spec_from_arguments(options))
        self.client = CompletionClient(target, timeout_seconds=options.request_timeout)
        self.model: str = options.model or discovered
        if not isinstance(runner, WorkerRunner):
            ask = partial(self.client.complete, model=self.model)
            options.canary_answers = Canaries.ask(ask, workload, options.canary_share).answers
            # locust sends the options to the workers, with all that is added here.
            options.workers = [worker.id for worker in runner.clients.ready] if isinstance(runner, MasterRunner) else []
        canaries = Canaries.of(workload, options.canary_answers, options.canary_share)

        def part(whole: Iterator[T]) -> Iterator[T]:
            first = options.workers.index(runner.client_id) if isinstance(runner, WorkerRunner) else 0
            return itertools.islice(whole, first, None, max(1, len(options.workers)))

        numbers = part(itertools.islice(itertools.count(), options.requests))
        self.requests = canaries.mix(Turns(map(workload.request, numbers)), options.seed)
        self.offsets = None if options.rate is None else part(arrivals_from_arguments(options))
        self.began_seconds, self.began_cpu_seconds = time.perf_counter(), time.process_time()
        self.outcomes: list[Outcome] = []
        self.timeline = Timeline(self.began_seconds, web_charts.INTERVAL_SECONDS)
        self.worker_cpu_shares: dict[str, float] = {}
        self.is_finished = False
        self._num_sent = 0

    def add(self, outcome: Outcome, environment: Environment) -> None:
        """Add the outcome of a request. The last of `--requests` ends the run."""
        self.outcomes.append(outcome)
        options: Any = environment.parsed_options
        runner: Any = environment.runner
        if environment.web_ui is not None:
            self.timeline.add(outcome)
        if len(self.outcomes) == options.requests and not isinstance(runner, WorkerRunner):
            gevent.spawn(runner.quit if options.headless else runner.stop)

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of the run over time, until now or its end."""
        return self.timeline.rows(until_seconds=0.0 if self.is_finished else time.perf_counter())

    def load(self) -> LoadRun:
        """Return the load of this process until now, or that of all workers, with the CPU share of the busiest."""
        run = LoadRun.ended_now(self.outcomes, self.began_seconds, self.began_cpu_seconds)
        shares = self.worker_cpu_shares.values()
        return replace(run, client_cpu_share=max(shares)) if shares else run

    def send(self, runner: WorkerRunner) -> None:
        """Send the outcomes since the last message to the master, with times of the clock that machines share."""
        new, self._num_sent = self.outcomes[self._num_sent :], len(self.outcomes)
        moved = [msgspec.to_builtins(outcome.moved(_wall_clock())) for outcome in new]
        cpu_share = (time.process_time() - self.began_cpu_seconds) / (time.perf_counter() - self.began_seconds)
        runner.send_message(_MESSAGE, {"outcomes": moved, "cpu_share": cpu_share})

    def send_forever(self, runner: WorkerRunner) -> None:
        """Send the new outcomes to the master every second, until the run ends."""
        while not self.is_finished:
            gevent.sleep(_MESSAGE_SECONDS)
            self.send(runner)


def _wall_clock() -> float:
    """Return the wall-clock time at which `time.perf_counter()` was 0."""
    return time.time() - time.perf_counter()


class CompletionUser(User):
    """Locust user that sends requests of the workload, which also says if the user streams or disconnects early."""

    wait_time = constant(0)
    session: LoadSession | None = None  # set by `start`; None without a service

    @task
    def complete(self) -> None:
        """Send the next request of the workload, and record its outcome.

        In a closed loop, the user waits for Retry-After after a 429. In an open loop (`--rate`), the user first waits
        until the arrival time of the request. Latency counts from that time, even if all users were busy then.
        """
        session, intended = self.session, None
        request = None if session is None else next(session.requests, None)
        if session is None or request is None:
            raise StopUser
        if session.offsets is not None:
            intended = session.began_seconds + next(session.offsets)
            gevent.sleep(max(0.0, intended - time.perf_counter()))
        outcome = session.client.complete(request, model=session.model, intended_seconds=intended)
        self.record(outcome, request.path)
        session.add(outcome, self.environment)
        if session.offsets is None:
            gevent.sleep(outcome.retry_after_seconds)

    def record(self, outcome: Outcome, path: str) -> None:
        """Report a request to locust: its E2E latency as a request, and rows of its stream that no sum counts."""
        ending, is_slow = outcome.ending, outcome.client is ClientKind.SLOW
        failure = RuntimeError(f"{ending.value}: {outcome.detail}") if ending.is_failure else None
        self.environment.events.request.fire(
            request_type={Ending.SHED: "SHED", Ending.CANCELLED: "CANCEL"}.get(ending, "SLOW" if is_slow else "E2E"),
            name=path,
            response_time=1e3 * outcome.e2e_seconds,
            response_length=len(outcome.text),
            exception=failure,
            context={},
        )
        if is_slow:
            return
        gaps = outcome.itl_seconds
        rows = {"TTFT": outcome.ttft_seconds, "TPOT": outcome.tpot_seconds if ending is Ending.OK else None}
        rows |= dict(zip(("ITL", "ITL P99"), np.percentile(gaps, (50, 99)), strict=True)) if gaps else {}
        for row, seconds in rows.items():
            if seconds is not None:
                self.environment.stats.get(path, row).log(1e3 * float(seconds), 0)


# Options without a default. locust's web form sends their values as text, or as empty text.
_OPTIONAL_NUMBERS = {"rate": float, "requests": int} | {
    f"slo_{name}": float for name, (default, _) in options_of(report.Slo).items() if default is None
}


@events.init_command_line_parser.add_listener
def add_arguments(parser: LocustArgumentParser) -> None:
    """Add the load test's options to locust's command line and web form, which leaves out arguments of groups."""
    add_workload_arguments(parser)
    report.add_slo_arguments(parser)
    text = "open loop: requests per second, sent at random times; each user has at most one request at a time"
    add_options(parser, {"rate": (None, text)})
    add_arrival_arguments(parser)
    add_target_arguments(parser)
    parser.add_argument("--requests", type=int, metavar="N", help="end the run after N requests, or after --run-time")
    text = "directory in which each run gets a directory with results.json and results.html"
    parser.add_argument("--results", metavar="DIR", env_var="LOCUST_RESULTS", help=text, include_in_web_ui=False)


def three_digits(milliseconds: float) -> float:
    """Round milliseconds to three significant digits, because locust's whole milliseconds are too coarse for ITL."""
    return float(f"{milliseconds:.3g}")


@events.init.add_listener
def prepare(environment: Environment, runner: Runner, web_ui: WebUI | None, **_: Any) -> None:
    """Let the master receive the workers' outcomes, and add the charts to locust's web page."""
    if isinstance(runner, MasterRunner):
        runner.register_message(_MESSAGE, receive)
    if web_ui is not None:
        web_charts.add(web_ui, lambda: [] if CompletionUser.session is None else CompletionUser.session.rows())


def receive(environment: Environment, msg: Message, **_: Any) -> None:
    """Add the outcomes in a worker's message to those of the run."""
    if (session := CompletionUser.session) is None:
        return
    session.worker_cpu_shares[msg.node_id] = msg.data["cpu_share"]
    for outcome in msg.data["outcomes"]:
        session.add(msgspec.convert(outcome, Outcome).moved(-_wall_clock()), environment)


@events.test_start.add_listener
def start(environment: Environment, **_: Any) -> None:
    """Get model id and tokenizer of the service for all users. End the run with an error if that fails."""
    locust.stats.bucket_response_time = three_digits  # type: ignore[assignment]  # as locust's documentation suggests
    options: Any = environment.parsed_options
    runner: Any = environment.runner
    CompletionUser.session = None
    try:
        if environment.host is None:
            raise ValueError("--host is missing; give the service's URL, for example http://127.0.0.1:8000")
        for name, kind in _OPTIONAL_NUMBERS.items():
            given = getattr(options, name)
            setattr(options, name, None if given in (None, "") else kind(given))
        CompletionUser.session = session = LoadSession(environment.host, options, runner)
    except (OSError, ValueError, MeasurementFailed) as error:
        reason = getattr(error, "reason", error)  # a URLError is printed as "<urlopen error ...>"
        hint = "; set KVASIR_API_KEY" if getattr(error, "code", None) == HTTPStatus.UNAUTHORIZED else ""
        text = f"cannot start a load test of {environment.host}: {reason}{hint}"
        if environment.web_ui is not None:
            log.error(text)
            gevent.spawn(runner.stop)
            return
        environment.events.quit.add_listener(lambda **_: log.error(text))  # after locust's empty tables
        signal.raise_signal(signal.SIGTERM)  # to locust's handler: end now, not when time is up
        return
    if isinstance(runner, WorkerRunner):
        gevent.spawn(session.send_forever, runner)


@events.test_stop.add_listener
def stop(environment: Environment, **_: Any) -> None:
    """Send a worker's last outcomes, or finish a run of the web page. Later, `end` finishes a headless run."""
    session, runner = CompletionUser.session, environment.runner
    if isinstance(runner, WorkerRunner):
        if session is not None:
            session.is_finished = True
            session.send(runner)
    elif environment.web_ui is not None:
        finish(environment)


@events.quitting.add_listener
def end(environment: Environment, **_: Any) -> None:
    """Finish the run. Exit with 2 if nothing was measured. A headless master has now received the last outcomes."""
    if not isinstance(environment.runner, WorkerRunner):
        finish(environment)
        if CompletionUser.session is None:
            environment.process_exit_code = 2


def finish(environment: Environment) -> None:
    """Print and save the results of a run, once. Set locust's exit code: 0, or 1 for a missed objective."""
    session, runner = CompletionUser.session, environment.runner
    options: Any = environment.parsed_options
    if session is None or session.is_finished or runner is None:
        return
    session.is_finished = True
    users, rate = runner.target_user_count, options.rate
    result = report.summarize(
        session.load(),
        label=f"{users} users" if rate is None else f"{rate:g} per s",
        slo=report.Slo.from_arguments(options),
        request_rate=rate,
        max_concurrency=users,
    )
    environment.process_exit_code = 1 if result["slo_breaches"] else 0
    text = report.markdown([result])
    if options.results:
        path = new_run(Path(options.results), "locust")
        facts = provenance("locust", sys.argv[1:]) | {"model_id": session.model, "url": environment.host}
        write_result(result | facts, path)
        # In another process: the libraries of plots would lengthen the start of every load.
        subprocess.run([sys.executable, "-m", "loadtest.sweep.page", str(path)], check=False)
    if environment.web_ui is None:
        environment.events.quit.add_listener(lambda **_: print(text))  # after locust's tables, which follow this event
    else:
        print(text)


if __name__ == "__main__":
    get_parser().print_help()
