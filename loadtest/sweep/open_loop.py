"""Open loop over HTTP: requests at random times that do not depend on the server."""

import itertools
import random
import time
from collections.abc import Generator, Iterator

import gevent
from gevent.pool import Group

from loadtest.client.outcome import Outcome
from loadtest.client.sse_client import CompletionClient, CompletionReader
from loadtest.client.workload import LoadRequest
from loadtest.sweep.level import LoadWindow


class OpenLoop:
    """Load on a server over HTTP, as `Load`. Requests are taken from one sequence, so no rate repeats a prompt."""

    def __init__(self, client: CompletionClient, requests: Iterator[LoadRequest], *, model: str, seed: int) -> None:
        self._client = client
        self._requests = requests
        self._model = model
        self._rng = random.Random(seed)

    def windows(self, count: int, seconds: float) -> Generator[LoadWindow]:
        """Send `count` requests in each window of this length, without end. `close` disconnects those in flight."""
        outcomes, greenlets, began = list[Outcome](), Group(), time.perf_counter()
        try:
            for number in itertools.count():
                start = began + number * seconds
                for offset in sorted(self._rng.uniform(0.0, seconds) for _ in range(count)):
                    gevent.sleep(max(0.0, start + offset - time.perf_counter()))
                    reader = CompletionReader(next(self._requests), start + offset)
                    outcomes.append(reader.outcome)
                    greenlets.start(gevent.Greenlet(self._client.read, reader, model=self._model))
                gevent.sleep(max(0.0, start + seconds - time.perf_counter()))
                yield LoadWindow(start + seconds, outcomes)
        finally:
            greenlets.kill()
