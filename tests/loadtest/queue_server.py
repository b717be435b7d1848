"""Servers of known capacity in simulated time: the loads of the sweep's tests take no time."""

import heapq
import itertools
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass

from loadtest.client.outcome import ClientKind, Ending, Outcome
from loadtest.sweep.level import LoadWindow


def _outcome(index: int, at: float) -> Outcome:
    return Outcome(index=index, client=ClientKind.STREAMING, intended_seconds=at, sent_seconds=at, prompt_tokens=8)


@dataclass
class QueueServer:
    """First-come-first-served queue before `num_slots` slots, with random service times.

    service: seconds of service of the next request. max_waiting: requests beyond this queue are rejected with 429.
    """

    num_slots: int
    service: Callable[[random.Random], float]
    seed: int = 0
    max_waiting: float = float("inf")

    def windows(self, count: int, seconds: float) -> Generator[LoadWindow]:
        rng = random.Random(self.seed)
        free, outcomes, started = [0.0] * self.num_slots, list[Outcome](), list[float]()
        for number in itertools.count():
            for at in sorted(seconds * (number + rng.random()) for _ in range(count)):
                outcome = _outcome(len(outcomes), at)
                outcomes.append(outcome)
                while started and started[0] <= at:
                    heapq.heappop(started)
                if len(started) >= self.max_waiting:
                    outcome.ending, outcome.end_seconds = Ending.SHED, at + 1e-4
                    continue
                start = max(at, heapq.heappop(free))
                heapq.heappush(started, start)
                outcome.end_seconds = start + self.service(rng)
                heapq.heappush(free, outcome.end_seconds)
                outcome.completion_tokens = 4
                outcome.chunk_seconds = [
                    start + share * (outcome.end_seconds - start) for share in (0.25, 0.5, 0.75, 1)
                ]
            yield LoadWindow(seconds * (number + 1), outcomes)


@dataclass
class BatchServer:
    """Continuous batching: a step of `fixed + each * k` seconds gives a token to each of at most `max_batch` requests.

    The capacity is max_batch / (num_tokens * (fixed + each * max_batch)) requests per second.
    """

    fixed: float
    each: float
    max_batch: int
    num_tokens: int
    seed: int = 0

    @property
    def capacity(self) -> float:
        return self.max_batch / (self.num_tokens * (self.fixed + self.each * self.max_batch))

    def windows(self, count: int, seconds: float) -> Generator[LoadWindow]:
        rng, now = random.Random(self.seed), 0.0
        outcomes, waiting, running = list[Outcome](), list[Outcome](), list[Outcome]()
        for number in itertools.count():
            arrivals = [seconds * (number + rng.random()) for _ in range(count)]
            new = [_outcome(len(outcomes) + index, at) for index, at in enumerate(sorted(arrivals))]
            outcomes += new
            waiting += new
            while now < seconds * (number + 1):
                while waiting and len(running) < self.max_batch and waiting[0].intended_seconds <= now:
                    running.append(waiting.pop(0))
                if not running:
                    now = max(now, waiting[0].intended_seconds) if waiting else seconds * (number + 1)
                    continue
                now += self.fixed + self.each * len(running)
                for outcome in running:
                    outcome.chunk_seconds.append(now)
                    outcome.completion_tokens += 1
                    if outcome.completion_tokens == self.num_tokens:
                        outcome.end_seconds = now
                running = [outcome for outcome in running if not outcome.end_seconds]
            yield LoadWindow(seconds * (number + 1), outcomes)
