"""Closed and open loop of completion requests.

Closed loop: N clients send one request after the other. Open loop: requests arrive at random times (Poisson). Latency
counts from the intended send.
"""

import time
from collections.abc import Iterable
from typing import Any

import gevent

from loadtest.client.outcome import Ending, LoadRun, Outcome
from loadtest.client.sse_client import CompletionClient, Target
from loadtest.client.workload import LoadRequest
from loadtest.measurement.benchmark_program import MeasurementFailed


def run_closed(client: CompletionClient, requests: Iterable[LoadRequest], *, num_streams: int) -> LoadRun:
    """Send the requests from N clients. Each client waits for the end of its last request, and for its Retry-After."""
    queue, outcomes = iter(requests), list[Outcome]()

    def stream() -> None:
        for request in queue:
            outcome = client.complete(request)
            outcomes.append(outcome)
            gevent.sleep(outcome.retry_after_seconds)

    return _join(outcomes, [gevent.spawn(stream) for _ in range(num_streams)])


def run_open(client: CompletionClient, requests: Iterable[LoadRequest], *, offsets: Iterable[float]) -> LoadRun:
    """Send each request at its offset, in seconds from now. A rejected client does not retry."""
    outcomes, start = list[Outcome](), time.perf_counter()

    def send(request: LoadRequest, intended: float) -> None:
        gevent.sleep(max(0.0, intended - time.perf_counter()))
        outcomes.append(client.complete(request, intended_seconds=intended))

    pairs = zip(offsets, requests, strict=False)
    return _join(outcomes, [gevent.spawn(send, request, start + offset) for offset, request in pairs])


def _join(outcomes: list[Outcome], greenlets: list[Any]) -> LoadRun:
    """Run the greenlets, which begin only now, to their ends. Return the load that they made."""
    began = time.perf_counter(), time.process_time()
    gevent.joinall(greenlets, raise_error=True)
    return LoadRun.ended_now(outcomes, *began)


def complete_all(
    target: Target, requests: Iterable[LoadRequest], *, num_streams: int, timeout_seconds: float = 120.0
) -> LoadRun:
    """Send the requests in a closed loop. Raises `MeasurementFailed` if a completion is not complete."""
    client = CompletionClient(target, timeout_seconds=timeout_seconds)
    run = run_closed(client, requests, num_streams=num_streams)
    client.close()
    for outcome in run.outcomes:
        if outcome.ending is not Ending.OK:
            raise MeasurementFailed(f"request {outcome.index} ended with {outcome.ending.value}: {outcome.detail}")
    return run
