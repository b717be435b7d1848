"""Load test as locust users, headless or with locust's web page, with an exit code from the objectives.

Request types in locust's table: TTFT and TPOT count once per stream, ITL once per chunk after the first. The whole time
of a request is SHED after a 429 (not an error), CANCEL if the client disconnected as planned, and otherwise E2E.
"""

import itertools
import logging
import signal
import sys
import time
from functools import partial
from http import HTTPStatus
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
from loadtest.client.arrivals import add_arrival_arguments, arrivals_from_arguments
from loadtest.client.canaries import Canaries
from loadtest.client.outcome import Ending, LoadRun, Outcome
from loadtest.client.sse_client import CompletionClient, Target, discover
from loadtest.client.workload import add_workload_arguments, spec_from_arguments
from loadtest.measurement.benchmark_program import MeasurementFailed, add_options, provenance, write_result

log = logging.getLogger("loadtest")


class LoadSession:
    """State that the users of one locust run share: HTTP client, workload, and outcomes of requests."""

    def __init__(self, host: str, options: Any) -> None:
        target = Target.parse(host)
        discovered, workload = discover(target, spec_from_arguments(options))
        self.client = CompletionClient(target, timeout_seconds=options.request_timeout)
        self.model: str = options.model or discovered
        canaries = Canaries.ask(partial(self.client.complete, model=self.model), workload, options.canary_share)
        self.requests = canaries.mix(itertools.islice(workload, options.requests), options.seed)
        self.began_seconds, self.began_cpu_seconds = time.perf_counter(), time.process_time()
        self.offsets = None if options.rate is None else arrivals_from_arguments(options)
        self.outcomes: list[Outcome] = []


class CompletionUser(User):
    """Locust user that sends requests of the workload, which also says if the user streams or disconnects early."""

    wait_time = constant(0)
    session: LoadSession | None = None  # set by `start`; None without a service

    @task
    def complete(self) -> None:
        """Send the next request of the workload, and record its outcome. The last of `--requests` ends the locust run.

        In a closed loop, the user waits for Retry-After after a 429. In an open loop (`--rate`), the user first waits
        until the arrival time of the request. Latency counts from that time, even if all users were busy then.
        """
        session, options, intended = self.session, self.environment.parsed_options, None
        request = None if session is None else next(session.requests, None)
        if session is None or request is None:
            raise StopUser
        if session.offsets is not None:
            intended = session.began_seconds + next(session.offsets)
            gevent.sleep(max(0.0, intended - time.perf_counter()))
        outcome = session.client.complete(request, model=session.model, intended_seconds=intended)
        session.outcomes.append(outcome)
        self.record(outcome, request.path)
        if session.offsets is None:
            gevent.sleep(outcome.retry_after_seconds)
        if options is not None and len(session.outcomes) == options.requests:
            signal.raise_signal(signal.SIGTERM)  # to locust's handler, which reports and ends the program

    def record(self, outcome: Outcome, path: str) -> None:
        """Report the E2E latency, TTFT, TPOT and each ITL of one request to locust, as separate request types."""
        ending = outcome.ending
        failure = RuntimeError(f"{ending.value}: {outcome.detail}") if ending.is_failure else None
        kind = {Ending.SHED: "SHED", Ending.CANCELLED: "CANCEL"}.get(ending, "E2E")
        rows: list[tuple[str, float | None]] = [(kind, outcome.e2e_seconds), ("TTFT", outcome.ttft_seconds)]
        rows += [("TPOT", outcome.tpot_seconds if ending is Ending.OK else None)]
        rows += [("ITL", gap) for gap in outcome.itl_seconds]
        for row, seconds in rows:
            if seconds is not None:
                self.environment.events.request.fire(
                    request_type=row,
                    name=path,
                    response_time=1e3 * seconds,
                    response_length=len(outcome.text) if row == kind else 0,
                    exception=failure if row == kind else None,
                    context={},
                )


@events.init_command_line_parser.add_listener
def add_arguments(parser: LocustArgumentParser) -> None:
    """Add the load test's options to locust's command line."""
    add_workload_arguments(parser.add_argument_group("Workload"))
    report.add_slo_arguments(parser.add_argument_group("Objectives (exit code 1 if one is missed)"))
    group = parser.add_argument_group("Completions")
    text = "open loop: requests per second, sent at random times; each user has at most one request at a time"
    add_options(group, {"rate": (None, text), "request-timeout": (120.0, "timeout of a request in seconds")})
    add_arrival_arguments(group)
    group.add_argument("--model", help="model id to request (default: the first of /v1/models)")
    group.add_argument("--requests", type=int, metavar="N", help="end the run after N requests, or after --run-time")
    group.add_argument(
        "--results", metavar="DIR", env_var="LOCUST_RESULTS", help="directory in which results.json is written"
    )


def three_digits(milliseconds: float) -> float:
    """Round milliseconds to three significant digits, because locust's whole milliseconds are too coarse for ITL."""
    return float(f"{milliseconds:.3g}")


@events.test_start.add_listener
def start(environment: Environment, **_: Any) -> None:
    """Get model id and tokenizer of the service for all users. End locust with an error if that fails."""
    locust.stats.bucket_response_time = three_digits  # type: ignore[assignment]  # as locust's documentation suggests
    if not isinstance(environment.runner, LocalRunner):
        log.warning("distributed run: objectives and --results need a single process; only locust's tables are written")
    try:
        if environment.host is None:
            raise ValueError("--host is missing; give the service's URL, for example http://127.0.0.1:8000")
        CompletionUser.session = LoadSession(environment.host, environment.parsed_options)
    except (OSError, ValueError, MeasurementFailed) as error:
        reason = getattr(error, "reason", error)  # a URLError is printed as "<urlopen error ...>"
        hint = "; set KVASIR_API_KEY" if getattr(error, "code", None) == HTTPStatus.UNAUTHORIZED else ""
        text = f"cannot start a load test of {environment.host}: {reason}{hint}"
        environment.events.quit.add_listener(lambda **_: log.error(text))  # after locust's empty tables
        signal.raise_signal(signal.SIGTERM)  # to locust's handler: end now, not when time is up


@events.quitting.add_listener
def finish(environment: Environment, **_: Any) -> None:
    """Print and save the results. Set locust's exit code: 0; 1 for a missed objective; 2 if nothing was measured."""
    session, options, runner = CompletionUser.session, environment.parsed_options, environment.runner
    if not isinstance(runner, LocalRunner):
        return
    if session is None or options is None:
        environment.process_exit_code = 2
        return
    users, rate = runner.target_user_count, options.rate
    result = report.summarize(
        LoadRun.ended_now(session.outcomes, session.began_seconds, session.began_cpu_seconds),
        label=f"{users} users" if rate is None else f"{rate:g} per s",
        slo=report.Slo.from_arguments(options),
        request_rate=rate,
        max_concurrency=users,
    )
    text = report.markdown([result])
    environment.events.quit.add_listener(lambda **_: print(text))  # after locust's tables, which follow this event
    if options.results:
        facts = provenance("locust", sys.argv[1:]) | {"model_id": session.model}
        write_result(result | facts, Path(options.results, "results.json"))
    environment.process_exit_code = 1 if result["slo_breaches"] else 0
