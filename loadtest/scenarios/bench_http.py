"""Benchmark of a running service over HTTP.

    python -m loadtest.scenarios.bench_http --url http://127.0.0.1:8000 --streams 1 4 16 64
    python -m loadtest.scenarios.bench_http --url http://127.0.0.1:8000 --rate 2 4 8 16 --slo-ttft-p95-ms 500

Closed loop: each of N clients sends its next request when its last has ended. It measures throughput and hides
overload, because a slow server receives fewer requests. Open loop: requests arrive at random times (Poisson),
independent of the server. Latency counts from the time at which a request should have been sent.
"""

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from loadtest.client import report, slo
from loadtest.client.outcome import Outcome
from loadtest.client.service_discovery import discover
from loadtest.client.slo import Slo
from loadtest.client.sse_client import API_KEY_VARIABLE, AsyncClient, Target, api_key_given
from loadtest.client.workload import CompletionRequest, Workload, add_workload_arguments, spec_from_arguments
from loadtest.measurement.provenance import provenance

# Above this share of a core, the client itself delays what it measures.
BUSY_CLIENT_SHARE = 0.7
OPEN_LOOP_REQUESTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Outcomes of one load, its duration, and the client's CPU use.

    duration_seconds: first intended send to last end.
    client_cpu_share: this process's CPU time over wall time; 1 is one core.
    """

    outcomes: tuple[Outcome, ...]
    duration_seconds: float
    client_cpu_share: float


async def run_closed(
    client: AsyncClient, requests: Iterable[CompletionRequest], *, model: str | None, num_streams: int
) -> Run:
    """Send the requests from N clients. Each client waits for the end of its last request, and for its Retry-After."""
    queue = iter(requests)
    outcomes: list[Outcome] = []

    async def stream() -> None:
        for request in queue:
            outcome = await client.complete(request, model=model)
            outcomes.append(outcome)
            await asyncio.sleep(outcome.retry_after_seconds)

    return await _timed(outcomes, (stream() for _ in range(num_streams)))


async def run_open(
    client: AsyncClient, requests: Iterable[CompletionRequest], *, model: str | None, rate: float, seed: int
) -> Run:
    """Send the requests at `rate` per second with exponential gaps (a Poisson process), seeded."""
    outcomes: list[Outcome] = []
    start = time.perf_counter()

    async def send(request: CompletionRequest, intended: float) -> None:
        await asyncio.sleep(max(0.0, intended - time.perf_counter()))
        outcomes.append(await client.complete(request, model=model, intended_seconds=intended))

    times = (start + offset for offset in arrivals(rate, seed))
    return await _timed(outcomes, (send(*pair) for pair in zip(requests, times, strict=False)))


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield the arrival times of a Poisson process of `rate` per second, in seconds from the start."""
    rng = random.Random(seed)
    return itertools.accumulate(iter(lambda: rng.expovariate(rate), None))


async def _timed(outcomes: list[Outcome], workers: Iterable[Any]) -> Run:
    cpu = time.process_time()
    start = time.perf_counter()
    await asyncio.gather(*workers)
    cpu_share = (time.process_time() - cpu) / max(time.perf_counter() - start, 1e-9)
    first = min((outcome.intended_seconds for outcome in outcomes), default=start)
    last = max((outcome.end_seconds for outcome in outcomes), default=start)
    return Run(outcomes=tuple(outcomes), duration_seconds=max(last - first, 1e-9), client_cpu_share=cpu_share)


@dataclass(frozen=True, slots=True)
class _Load:
    """One row of the report: a number of streams, or a rate."""

    num_streams: int | None
    rate: float | None

    @property
    def label(self) -> str:
        if self.num_streams is None:
            return f"{self.rate:g} per s"
        return f"{self.num_streams} stream{'s' if self.num_streams > 1 else ''}"


async def _bench(arguments: argparse.Namespace, limits: Slo) -> list[dict[str, Any]]:
    target = Target.parse(arguments.url, api_key=api_key_given())
    service = discover(target)
    spec = spec_from_arguments(arguments, service.max_context_tokens)
    workload = Workload(spec, service.passages)
    model = service.model if arguments.model is None else arguments.model
    client = AsyncClient(target, timeout_seconds=arguments.timeout)
    loads = [_Load(streams, None) for streams in arguments.streams]
    loads += [_Load(None, rate) for rate in arguments.rate]
    indexes = itertools.count()  # every run gets new requests, so that the prefix cache does not help it
    results = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("load", total=len(loads))
        await run_closed(
            client,
            (workload.request(next(indexes)) for _ in range(arguments.warmup)),
            model=model,
            num_streams=4,
        )
        for load in loads:
            progress.update(task, description=load.label)
            requests = [workload.request(next(indexes)) for _ in range(_num_requests(arguments, load))]
            if load.num_streams is not None:
                run = await run_closed(client, requests, model=model, num_streams=load.num_streams)
            else:
                assert load.rate is not None
                run = await run_open(client, requests, model=model, rate=load.rate, seed=spec.seed)
            results.append(_result(load, run, limits))
            progress.advance(task)
    await client.close()
    return [result | {"model_id": model} for result in results]


def _num_requests(arguments: argparse.Namespace, load: _Load) -> int:
    if arguments.requests is not None:
        return int(arguments.requests)
    return OPEN_LOOP_REQUESTS if load.num_streams is None else load.num_streams * arguments.requests_per_stream


def _result(load: _Load, run: Run, limits: Slo) -> dict[str, Any]:
    return report.summarize(
        run.outcomes,
        label=load.label,
        duration_seconds=run.duration_seconds,
        slo=limits,
        request_rate=load.rate,
        max_concurrency=load.num_streams,
        client_cpu_share=run.client_cpu_share,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.scenarios.bench_http",
        description="Load a running service and measure it over HTTP. Exit code 1: an objective was missed.",
        epilog=f"The API key in {API_KEY_VARIABLE}, if set, is sent to the service.",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="base URL of the service (default: %(default)s)")
    add("--model", help="model id (default: the first of /v1/models)")
    add("--streams", type=int, nargs="+", default=[], metavar="N", help="closed loop: concurrent clients")
    add(
        "--rate",
        type=float,
        nargs="+",
        default=[],
        metavar="X",
        help="open loop: requests per second, Poisson arrivals",
    )
    add("--requests", type=int, metavar="N", help="requests per run (default of an open loop: 64)")
    add(
        "--requests-per-stream",
        type=int,
        default=4,
        metavar="N",
        help="requests per client in a closed loop without --requests (default: %(default)s)",
    )
    add(
        "--warmup",
        type=int,
        default=4,
        metavar="N",
        help="requests before the first run (default: %(default)s)",
    )
    add(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="timeout of a request in seconds (default: %(default)g)",
    )
    add("--out", type=Path, help="directory for results.json, report.md and report.png")
    add_workload_arguments(parser.add_argument_group("workload"))
    slo.add_arguments(parser.add_argument_group("objectives"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the loads and report. Return the exit code: 0; 1 for a missed objective; 2 for an unreachable service."""
    given = sys.argv[1:] if argv is None else argv
    parser = _parser()
    arguments = parser.parse_args(given)
    if not arguments.streams and not arguments.rate:
        arguments.streams = [1, 4, 16, 64]
    try:
        limits = Slo.from_arguments(arguments)
        facts = provenance(parser.prog, given)
        results = [result | facts for result in asyncio.run(_bench(arguments, limits))]
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        print(f"{parser.prog}: {arguments.url}: {error}", file=sys.stderr)
        return 2
    print(report.markdown(results))
    for result in results:
        if result["client_cpu_share"] > BUSY_CLIENT_SHARE:
            share = result["client_cpu_share"]
            print(f"warning: {result['label']}: the client used {share:.0%} of a core", file=sys.stderr)
    if arguments.out is not None:
        for path in report.write(results, arguments.out):
            print(path)
    return 1 if any(result["slo_breaches"] for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
