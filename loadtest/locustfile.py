"""Load test as locust users, headless, with an exit code from the objectives.

    locust -f loadtest/locustfile.py --headless --host http://127.0.0.1:8000 -u 16 -r 16 -t 30s \\
        --workload mixed --whole-share 0.1 --cancelling-share 0.1 --slo-ttft-p95-ms 500 --results results

Rows by request type: E2E once per request, TTFT and TPOT once per stream, ITL once per chunk of text after the
first, SHED for a 429 (shed load is not an error) and LEFT for a client that disconnects as planned. A failed
request is an E2E row with its kind as the failure.

locust patches the standard library for gevent: never import this file in a program that uses asyncio.

`locust --help` does not show a locustfile's options. They are those of `python -m loadtest.scenarios.bench_http
--help`, with --results (or LOCUST_RESULTS) for its --out. The API key in KVASIR_API_KEY is sent to the service.
"""

import itertools
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

import locust.stats
from locust import User, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner

from loadtest.client import report
from loadtest.client.outcome import Ending, Outcome
from loadtest.client.service_discovery import discover
from loadtest.client.sse_client import COMPLETIONS_PATH, Target, api_key_given, complete_blocking
from loadtest.client.workload import Workload, add_workload_arguments, spec_from_arguments
from loadtest.measurement.provenance import provenance

log = logging.getLogger("loadtest")


def three_digits(milliseconds: float) -> float:
    """Round a response time to three significant digits, because locust's whole milliseconds are too coarse for ITL.

    Replaces locust's `bucket_response_time`, as locust's documentation suggests.
    """
    return float(f"{milliseconds:.3g}")


class RequestFailed(Exception):
    """A failure as locust's table shows it: kind and detail."""


class LoadSession:
    """State that the users of one run share: the workload, its counter, and the outcomes."""

    def __init__(self, environment: Environment) -> None:
        options = environment.parsed_options
        assert options is not None
        if environment.host is None:
            raise ValueError("--host is missing; give the service's URL, for example http://127.0.0.1:8000")
        self.environment = environment
        self.target = Target.parse(environment.host, api_key=api_key_given())
        service = discover(self.target)
        spec = spec_from_arguments(options, service.max_context_tokens)
        self.workload = Workload(spec, service.passages)
        self.model = service.model if options.model is None else options.model
        self.timeout_seconds: float = options.request_timeout
        self.num_requests: int | None = options.requests
        self.indexes = itertools.islice(itertools.count(), self.num_requests)
        self.outcomes: list[Outcome] = []
        self._began = time.perf_counter()
        self._cpu_began = time.process_time()

    def record(self, outcome: Outcome) -> None:
        """Store the outcome and report its rows to locust."""
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
        """Return the run with vLLM's keys. Requests still running when time was up are left out."""
        wall = max(time.perf_counter() - self._began, 1e-9)
        first = min((outcome.sent_seconds for outcome in self.outcomes), default=self._began)
        last = max((outcome.end_seconds for outcome in self.outcomes), default=self._began)
        runner = self.environment.runner
        return report.summarize(
            self.outcomes,
            label="locust",
            duration_seconds=max(last - first, 1e-9),
            slo=limits,
            request_rate=None,
            max_concurrency=None if runner is None else runner.target_user_count,
            client_cpu_share=(time.process_time() - self._cpu_began) / wall,
        )


class CompletionUser(User):
    """Closed-loop client. The workload chooses the kind of client for each request."""

    wait_time = constant(0)
    session: LoadSession | None = None  # set by `start`; None without a service

    @task
    def complete(self) -> None:
        """Send the next request of the workload and record its outcome."""
        session = self.session
        index = None if session is None else next(session.indexes, None)
        if session is None or index is None:
            raise StopUser
        outcome = complete_blocking(
            session.target,
            session.workload.request(index),
            model=session.model,
            timeout_seconds=session.timeout_seconds,
        )
        session.record(outcome)
        time.sleep(outcome.retry_after_seconds)  # patched by gevent; obeys Retry-After
        if len(session.outcomes) == session.num_requests:
            signal.raise_signal(signal.SIGTERM)  # to locust's handler, which reports and ends the program


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """Add the load test's options to locust's."""
    add_workload_arguments(parser.add_argument_group("Workload"))
    report.add_slo_arguments(parser.add_argument_group("Objectives (exit code 1 if one is missed)"))
    group = parser.add_argument_group("Completions")
    group.add_argument("--model", help="model id (default: the first of /v1/models)")
    group.add_argument("--requests", type=int, metavar="N", help="stop after N requests, or when time is up")
    text = "timeout of a request in seconds (default: 120)"
    group.add_argument("--request-timeout", type=float, default=120.0, metavar="S", help=text)
    text = "directory for results.json, report.md, report.png"
    group.add_argument("--results", metavar="DIR", env_var="LOCUST_RESULTS", help=text)


@events.test_start.add_listener
def start(environment: Environment, **_: Any) -> None:
    """Discover the service once, for all users. Exit with an error if it cannot be reached."""
    locust.stats.bucket_response_time = three_digits  # type: ignore[assignment]  # locust works with floats too
    if not isinstance(environment.runner, LocalRunner):
        log.warning("distributed run: objectives and --results need a single process; only locust's tables are written")
    try:
        CompletionUser.session = LoadSession(environment)
    except (OSError, ValueError) as error:
        log.error("%s: %s", environment.host, error)
        signal.raise_signal(signal.SIGTERM)  # to locust's handler: end now, not when time is up


@events.quitting.add_listener
def finish(environment: Environment, **_: Any) -> None:
    """Report, and set the exit code: 0; 1 for a missed objective; 2 if nothing was measured."""
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
        facts = provenance("locust", sys.argv[1:])
        for path in report.write([result | facts], Path(environment.parsed_options.results)):
            print(path)
    environment.process_exit_code = 1 if result["slo_breaches"] else 0
