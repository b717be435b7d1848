"""Loads of the overload benchmark and their figures: a closed loop of streams, and an open loop of arrivals.

Throughput counts the tokens of finished completions that arrived in the steady part of a load, from `settle` to its
end. A completion that extends beyond the steady part counts by the share of its chunks inside.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.client.outcome import Ending, Outcome
from loadtest.client.sse_client import AsyncClient
from loadtest.client.workload import CompletionRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One load and its outcomes. Times are seconds of `time.perf_counter()`.

    settled_seconds: begin of the steady part.
    client_cpu_share: CPU of this process, as a share of a core.
    """

    began_seconds: float
    settled_seconds: float
    ended_seconds: float
    outcomes: tuple[Outcome, ...]
    client_cpu_share: float

    @property
    def seconds(self) -> float:
        """Length of the steady part."""
        return self.ended_seconds - self.settled_seconds

    @property
    def steady(self) -> list[Outcome]:
        """Outcomes of requests with an intended send in the steady part."""
        return [o for o in self.outcomes if self.settled_seconds <= o.intended_seconds < self.ended_seconds]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of successful completions that arrived in the steady part, per second."""
        return sum(self._num_tokens(outcome) for outcome in self.outcomes) / self.seconds

    def _num_tokens(self, outcome: Outcome) -> float:
        if outcome.ending is not Ending.OK or not outcome.chunk_seconds:
            return 0.0
        inside = sum(self.settled_seconds <= seconds < self.ended_seconds for seconds in outcome.chunk_seconds)
        return outcome.completion_tokens * inside / len(outcome.chunk_seconds)

    @property
    def requests_per_second(self) -> float:
        """Completions that ended successfully in the steady part, per second."""
        ended = (o for o in self.outcomes if self.settled_seconds <= o.end_seconds < self.ended_seconds)
        return sum(o.ending is Ending.OK for o in ended) / self.seconds

    @property
    def ttfts_seconds(self) -> list[float]:
        """TTFT of each successful request of the steady part."""
        return [o.ttft_seconds for o in self.steady if o.ending is Ending.OK and o.ttft_seconds is not None]

    def ttft_seconds(self, percentile: float) -> float | None:
        """Return a percentile of the TTFT of successful requests, or None without any."""
        return ttft_of([self], percentile)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        endings = Counter(o.ending.value for o in self.steady)
        failures = Counter(f"{o.ending.value}: {o.detail}"[:120] for o in self.outcomes if o.ending.is_failure)
        ttft = {f"p{p}": _ms(self.ttft_seconds(p)) for p in (50, 90, 99)}
        return {
            "seconds": round(self.seconds, 1),
            "sent": len(self.steady),
            "sent_per_second": round(len(self.steady) / self.seconds, 2),
            "endings": dict(endings),
            "failures": dict(failures),
            "requests_per_second": round(self.requests_per_second, 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "ttft_ms": ttft,
            "client_cpu_share": round(self.client_cpu_share, 3),
        }


def rate_of(loads: Sequence[Load]) -> float:
    """Return the tokens per second of several loads together."""
    return sum(load.tokens_per_second * load.seconds for load in loads) / sum(load.seconds for load in loads)


def ttft_of(loads: Sequence[Load], percentile: float) -> float | None:
    """Return a percentile of the TTFT over several loads, or None without a successful request."""
    ttfts = [ttft for load in loads for ttft in load.ttfts_seconds]
    return float(np.percentile(ttfts, percentile)) if ttfts else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


async def closed_loop(
    client: AsyncClient,
    requests: Iterator[CompletionRequest],
    *,
    num_streams: int,
    seconds: float,
    settle_seconds: float,
) -> Load:
    """Run `num_streams` clients. Each sends its next request when its last has ended, and obeys Retry-After."""

    async def drive(end: float, outcomes: list[Outcome]) -> None:
        async def stream() -> None:
            while time.perf_counter() < end:
                outcome = await client.complete(next(requests), model=None)
                outcomes.append(outcome)
                await asyncio.sleep(outcome.retry_after_seconds)

        await asyncio.gather(*(stream() for _ in range(num_streams)))

    return await _measured(drive, seconds=seconds, settle_seconds=settle_seconds)


async def open_loop(
    client: AsyncClient,
    requests: Iterator[CompletionRequest],
    *,
    rate: float,
    seconds: float,
    settle_seconds: float,
    seed: int,
) -> Load:
    """Send requests as a Poisson process of `rate` per second. A rejected client does not retry."""
    rng = random.Random(seed)

    async def drive(end: float, outcomes: list[Outcome]) -> None:
        async def send(request: CompletionRequest, intended: float) -> None:
            outcomes.append(await client.complete(request, model=None, intended_seconds=intended))

        tasks = set()
        intended = time.perf_counter()
        while (intended := intended + rng.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, intended - time.perf_counter()))
            task = asyncio.create_task(send(next(requests), intended))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    return await _measured(drive, seconds=seconds, settle_seconds=settle_seconds)


async def _measured(
    drive: Callable[[float, list[Outcome]], Awaitable[None]], *, seconds: float, settle_seconds: float
) -> Load:
    outcomes: list[Outcome] = []
    began, cpu = time.perf_counter(), time.process_time()
    await drive(began + settle_seconds + seconds, outcomes)
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    return Load(
        began_seconds=began,
        settled_seconds=began + settle_seconds,
        ended_seconds=began + settle_seconds + seconds,
        outcomes=tuple(outcomes),
        client_cpu_share=share,
    )


def growth_per_minute(samples: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope of values over seconds, per minute; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    seconds, values = zip(*samples, strict=True)
    return float(np.polyfit(seconds, values, 1)[0]) * 60.0


def histogram_between(before: str, after: str, name: str) -> list[tuple[float, int]]:
    """Return the counts that a Prometheus histogram gained between two scrapes, as (upper bound, count), not
    cumulative.
    """
    first, last = _buckets(before, name), _buckets(after, name)
    counts = [(bound, count - first.get(bound, 0)) for bound, count in sorted(last.items())]
    lower = [0, *(count for _, count in counts)]
    return [(bound, count - below) for (bound, count), below in zip(counts, lower[:-1], strict=True)]


def _buckets(scrape: str, name: str) -> dict[float, int]:
    lines = (line for line in scrape.splitlines() if line.startswith(f"{name}_bucket{{"))
    return {float(line.partition('le="')[2].partition('"')[0]): round(float(line.rpartition(" ")[2])) for line in lines}


def numbered(make: Callable[[int], CompletionRequest]) -> Iterator[CompletionRequest]:
    """Yield requests number 0, 1, 2, ..."""
    return map(make, itertools.count())
