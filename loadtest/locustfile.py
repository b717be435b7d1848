"""Load test as locust users, headless or with locust's web page, with an exit code from the objectives.

Rows of locust's table by request type: E2E once per request, TTFT and TPOT once per stream, ITL once per chunk of text
after the first, SHED for a 429 (not an error) and LEFT for a client that disconnects as planned.
"""

import itertools
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gevent
import locust.stats
from locust import User, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner

from loadtest.client import report
from loadtest.client.outcome import Ending, LoadRun, Outcome
from loadtest.client.sse_client import COMPLETIONS_PATH, CompletionClient, Target, api_key_given, discover
from loadtest.client.workload import add_workload_arguments, arrivals, spec_from_arguments
from loadtest.measurement.provenance import provenance, tell

log = logging.getLogger("loadtest")


class RequestFailed(Exception):
    """A failed request as locust's table shows it: kind and detail."""


class LoadSession:
    """State that the users of one locust run share: client, workload and outcomes."""

    def __init__(self, environment: Environment) -> None:
        options = environment.parsed_options
        assert options is not None
        if environment.host is None:
            raise ValueError("--host is missing; give the service's URL, for example http://127.0.0.1:8000")
        target = Target.parse(environment.host, api_key=api_key_given())
        discovered, workload = discover(target, spec_from_arguments(options))
        self.environment = environment
        self.client = CompletionClient(target, timeout_seconds=options.request_timeout)
        self.model: str = options.model or discovered
        self.num_requests: int | None = options.requests
        self.rate: float | None = options.rate
        self.requests = map(workload.request, itertools.islice(itertools.count(), self.num_requests))
        self.outcomes: list[Outcome] = []
        self._began = time.perf_counter(), time.process_time()
        self._arrivals = itertools.repeat(0.0) if self.rate is None else arrivals(self.rate, options.seed)

    def complete(self) -> None:
        """Send the next request of the workload, and record its outcome.

        In a closed loop, a rejected user waits for Retry-After. In an open loop (`--rate`), a user first waits for the
        arrival of the request. Latency counts from the arrival, even if no user was free in time.
        """
        if (request := next(self.requests, None)) is None:
            raise StopUser
        intended = None if self.rate is None else self._began[0] + next(self._arrivals)
        gevent.sleep(max(0.0, (intended or 0.0) - time.perf_counter()))
        outcome = self.client.complete(request, model=self.model, intended_seconds=intended)
        self._record(outcome)
        if self.rate is None:
            gevent.sleep(outcome.retry_after_seconds)
        if len(self.outcomes) == self.num_requests:
            signal.raise_signal(signal.SIGTERM)  # to locust's handler, which reports and ends the program

    def _record(self, outcome: Outcome) -> None:
        """Store the outcome of a request, and report its rows to locust."""
        self.outcomes.append(outcome)
        ending = outcome.ending
        failure = RequestFailed(f"{ending.value}: {outcome.detail}") if ending.is_failure else None
        kind = {Ending.SHED: "SHED", Ending.CANCELLED: "LEFT"}.get(ending, "E2E")
        rows: list[tuple[str, float | None]] = [(kind, outcome.e2e_seconds), ("TTFT", outcome.ttft_seconds)]
        rows += [("TPOT", outcome.tpot_seconds if ending is Ending.OK else None)]
        rows += [("ITL", gap) for gap in outcome.itl_seconds]
        for row, seconds in rows:
            if seconds is not None:
                self.environment.events.request.fire(
                    request_type=row,
                    name=COMPLETIONS_PATH,
                    response_time=1e3 * seconds,
                    response_length=len(outcome.text) if row == kind else 0,
                    exception=failure if row == kind else None,
                    context={},
                )

    def summary(self, limits: report.Slo) -> dict[str, Any]:
        """Return the load with vLLM's keys. Requests still running when time was up are left out."""
        assert self.environment.runner is not None
        num_users = self.environment.runner.target_user_count
        label = f"{num_users} users" if self.rate is None else f"{self.rate:g} per s"
        run = LoadRun.ended_now(self.outcomes, *self._began)
        result = report.summarize(run, label=label, slo=limits, request_rate=self.rate, max_concurrency=num_users)
        return result | {"model_id": self.model}


class CompletionUser(User):
    """Client of the service. The workload chooses the kind of client for each request."""

    wait_time = constant(0)
    session: LoadSession | None = None  # set by `start`; None without a service

    @task
    def complete(self) -> None:
        """Send one request of the session."""
        if self.session is None:
            raise StopUser
        self.session.complete()


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """Add the load test's options to locust's."""
    add_workload_arguments(parser.add_argument_group("Workload"))
    report.add_slo_arguments(parser.add_argument_group("Objectives (exit code 1 if one is missed)"))
    add = parser.add_argument_group("Completions").add_argument
    add("--model", help="model id (default: the first of /v1/models)")
    text = "open loop with X Poisson arrivals per second, and with as many requests at a time as users"
    add("--rate", type=float, metavar="X", help=text)
    add("--requests", type=int, metavar="N", help="stop after N requests, or when time is up")
    text = "timeout of a request in seconds (default: 120)"
    add("--request-timeout", type=float, default=120.0, metavar="S", help=text)
    text = "directory for results.json, report.md, report.png"
    add("--results", metavar="DIR", env_var="LOCUST_RESULTS", help=text)


def three_digits(milliseconds: float) -> float:
    """Round a response time to three significant digits, because locust's whole milliseconds are too coarse for ITL."""
    return float(f"{milliseconds:.3g}")


@events.test_start.add_listener
def start(environment: Environment, **_: Any) -> None:
    """Discover the service once, for all users. End locust with an error if the service cannot be reached."""
    locust.stats.bucket_response_time = three_digits  # type: ignore[assignment]  # as locust's documentation suggests
    if not isinstance(environment.runner, LocalRunner):
        log.warning("distributed run: objectives and --results need a single process; only locust's tables are written")
    try:
        CompletionUser.session = LoadSession(environment)
    except (OSError, ValueError) as error:
        log.error("%s: %s", environment.host, error)
        signal.raise_signal(signal.SIGTERM)  # to locust's handler: end now, not when time is up


@events.quitting.add_listener
def finish(environment: Environment, **_: Any) -> None:
    """Report the load, and set locust's exit code: 0; 1 for a missed objective; 2 if nothing was measured."""
    session = CompletionUser.session
    if not isinstance(environment.runner, LocalRunner):
        return
    if session is None:
        environment.process_exit_code = 2
        return
    assert environment.parsed_options is not None
    result = session.summary(report.Slo.from_arguments(environment.parsed_options))
    print("\n" + report.markdown([result]))
    if environment.parsed_options.results:
        directory = Path(environment.parsed_options.results)
        report.write([result], directory)
        tell(result | provenance("locust", sys.argv[1:]), directory / "results.json")
    environment.process_exit_code = 1 if result["slo_breaches"] else 0
