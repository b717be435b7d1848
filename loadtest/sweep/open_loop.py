"""Open loop over HTTP: requests at times that do not depend on the server."""

import argparse
import itertools
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator

import gevent
from gevent.pool import Group

from loadtest.client.outcome import Outcome
from loadtest.client.requests import LoadRequest
from loadtest.client.sse_client import CompletionClient, CompletionReader, Target, discover
from loadtest.client.workload import Workload, spec_from_arguments
from loadtest.measurement.benchmark_program import MeasurementFailed
from loadtest.sweep.level import LoadWindow


def reach(arguments: argparse.Namespace) -> tuple[Target, str, Workload]:
    """Return the server at `--url`, the model to request, and the workload of the other options.

    Raises `ValueError` for invalid options, and `MeasurementFailed` if the server does not answer.
    """
    spec, target = spec_from_arguments(arguments), Target.parse(arguments.url, arguments.ca_file)
    try:
        discovered, workload = discover(target, spec)
    except OSError as error:
        reason = getattr(error, "reason", error)  # a URLError is printed as "<urlopen error ...>"
        raise MeasurementFailed(f"{target.url} does not answer: {reason}; is the server running?") from error
    return target, arguments.model or discovered, workload


class OpenLoop:
    """Load on a server over HTTP, as `Load`. Requests are taken from one sequence, so no rate repeats a prompt."""

    def __init__(self, client: CompletionClient, requests: Iterator[LoadRequest], *, model: str, seed: int) -> None:
        self._client = client
        self._requests = requests
        self._model = model
        self._rng = random.Random(seed)

    def run(self, offsets: Iterable[float], outcomes: list[Outcome], on_sent: Callable[[], None]) -> None:
        """Send a request at each offset in seconds from now, add its outcome to `outcomes`, and wait for all ends.

        The load ends early with the requests. on_sent: called after each send. An exception, such as that of Ctrl-C,
        disconnects the requests in flight.
        """
        greenlets, began = Group(), time.perf_counter()
        try:
            for offset in offsets:
                gevent.sleep(max(0.0, began + offset - time.perf_counter()))
                if (request := next(self._requests, None)) is None:
                    break
                self._send(request, began + offset, outcomes, greenlets)
                on_sent()
            greenlets.join()
        finally:
            greenlets.kill()

    def _send(self, request: LoadRequest, intended: float, outcomes: list[Outcome], greenlets: Group) -> None:
        reader = CompletionReader(request, intended)
        outcomes.append(reader.outcome)
        greenlets.start(gevent.Greenlet(self._client.read, reader, model=self._model))

    def windows(self, count: int, seconds: float) -> Generator[LoadWindow]:
        """Send `count` requests in each window of this length, without end. `close` disconnects those in flight."""
        outcomes, greenlets, began = list[Outcome](), Group(), time.perf_counter()
        try:
            for number in itertools.count():
                start = began + number * seconds
                for offset in sorted(self._rng.uniform(0.0, seconds) for _ in range(count)):
                    gevent.sleep(max(0.0, start + offset - time.perf_counter()))
                    self._send(next(self._requests), start + offset, outcomes, greenlets)
                gevent.sleep(max(0.0, start + seconds - time.perf_counter()))
                yield LoadWindow(start + seconds, outcomes)
        finally:
            greenlets.kill()
