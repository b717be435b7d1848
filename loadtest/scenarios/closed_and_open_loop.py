"""Closed and open loop of completions over HTTP.

Closed loop: each of N clients sends its next request when its last has ended, so a slow server receives fewer
requests. Open loop: requests arrive at random times (Poisson). Latency counts from the intended send.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from loadtest.client.outcome import Ending, Outcome
from loadtest.client.sse_client import AsyncClient, Target
from loadtest.client.workload import LoadRequest
from loadtest.measurement.benchmark_program import MeasurementFailed


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRun:
    """Outcomes of one load, its duration, and the client's CPU use.

    duration_seconds: first intended send to last end.
    client_cpu_share: this process's CPU time over wall time; 1 is one core.
    """

    outcomes: tuple[Outcome, ...]
    duration_seconds: float
    client_cpu_share: float

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens of all requests per second."""
        return sum(outcome.completion_tokens for outcome in self.outcomes) / self.duration_seconds


async def run_closed(
    client: AsyncClient, requests: Iterable[LoadRequest], *, model: str | None, num_streams: int
) -> LoadRun:
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
    client: AsyncClient, requests: Iterable[LoadRequest], *, model: str | None, offsets: Iterable[float]
) -> LoadRun:
    """Send each request at its offset, in seconds from now. A rejected client does not retry."""
    outcomes: list[Outcome] = []
    pairs = list(zip(offsets, requests, strict=False))
    start = time.perf_counter()

    async def send(request: LoadRequest, intended: float) -> None:
        await asyncio.sleep(max(0.0, intended - time.perf_counter()))
        outcomes.append(await client.complete(request, model=model, intended_seconds=intended))

    return await _timed(outcomes, (send(request, start + offset) for offset, request in pairs))


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield the arrival times of a Poisson process of `rate` per second, in seconds from the start."""
    rng = random.Random(seed)
    return itertools.accumulate(iter(lambda: rng.expovariate(rate), None))


async def _timed(outcomes: list[Outcome], workers: Iterable[Any]) -> LoadRun:
    cpu = time.process_time()
    start = time.perf_counter()
    await asyncio.gather(*workers)
    cpu_share = (time.process_time() - cpu) / max(time.perf_counter() - start, 1e-9)
    first = min((outcome.intended_seconds for outcome in outcomes), default=start)
    last = max((outcome.end_seconds for outcome in outcomes), default=start)
    return LoadRun(outcomes=tuple(outcomes), duration_seconds=max(last - first, 1e-9), client_cpu_share=cpu_share)


def complete_all(
    target: Target, requests: Iterable[LoadRequest], *, num_streams: int, timeout_seconds: float = 120.0
) -> LoadRun:
    """Send the requests in a closed loop. Raises `MeasurementFailed` if a completion is not complete."""

    async def run() -> LoadRun:
        client = AsyncClient(target, timeout_seconds=timeout_seconds)
        done = await run_closed(client, requests, model=None, num_streams=num_streams)
        await client.close()
        return done

    done = asyncio.run(run())
    for outcome in done.outcomes:
        if outcome.ending is not Ending.OK:
            raise MeasurementFailed(f"request {outcome.index} ended with {outcome.ending.value}: {outcome.detail}")
    return done
