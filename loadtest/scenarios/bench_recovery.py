"""Benchmark of recovery: the pause of streams after SIGKILL of the worker, with and without a standby worker."""

import argparse
import itertools
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gevent

from loadtest.client.outcome import Outcome
from loadtest.client.requests import LoadRequest
from loadtest.client.sse_client import CompletionClient, CompletionReader
from loadtest.measurement.benchmark_program import run_program, show
from loadtest.measurement.figures import spread
from loadtest.scenarios.service_benchmark import ServiceProcess, check_success, kvasir_serve

# Time for processes that start after the service is ready, such as a standby worker.
_SETTLE_SECONDS = 4.0


def _stream(service: ServiceProcess, count: int, num_tokens: int, *, kills: bool) -> tuple[list[Outcome], float]:
    """Run `count` streams. Return their outcomes, and the time at which every stream had a third of its tokens.

    kills: kill the worker process at that time.
    """
    client = CompletionClient(service.target, timeout_seconds=300)
    prompts = [f"There was a dog {number}" for number in range(count)]
    requests = [LoadRequest(index=i, prompt=text, max_tokens=num_tokens, seed=i) for i, text in enumerate(prompts)]
    readers = [CompletionReader(request) for request in requests]
    streams = [gevent.spawn(client.read, reader) for reader in readers]
    while any(len(reader.outcome.chunk_seconds) < num_tokens // 3 for reader in readers):
        if all(stream.ready() for stream in streams):
            break
        gevent.sleep(0.01)
    killed = time.perf_counter()
    if kills:
        (worker,) = service.processes("worker")
        worker.kill()
    outcomes = [stream.get() for stream in streams]
    client.close()
    check_success(outcomes)
    return outcomes, killed


def pause_after(killed: float, chunk_seconds: Sequence[float]) -> float:
    """Return the seconds from the kill of the worker to the end of the longest gap between chunks after the kill."""
    later = [killed, *(moment for moment in chunk_seconds if moment > killed)]
    gaps = {after - before: after - killed for before, after in itertools.pairwise(later)}
    return gaps[max(gaps)]


def measure(arguments: argparse.Namespace, flag: str) -> dict[str, Any]:
    """Measure a service with one flag: pauses for each number of streams, and memory of the standby worker.

    Each value of --streams has --repeats kills. The service exits after more than five worker deaths in a minute.
    """
    levels = []
    with ServiceProcess(kvasir_serve(arguments.checkpoint, [flag, *arguments.serve])) as service:
        service.wait_first_token()
        time.sleep(_SETTLE_SECONDS)
        standbys = [process.memory_full_info().uss for process in service.processes("standby")]
        for count in arguments.streams:
            show(f"{count} streams, {flag}")
            undisturbed, _ = _stream(service, count, arguments.output_tokens, kills=False)
            pauses, num_changed = [], 0
            for _ in range(arguments.repeats):
                outcomes, killed = _stream(service, count, arguments.output_tokens, kills=True)
                pairs = zip(outcomes, undisturbed, strict=True)
                num_changed += sum(outcome.text != other.text for outcome, other in pairs)
                pauses.append([pause_after(killed, outcome.chunk_seconds) for outcome in outcomes])
                time.sleep(_SETTLE_SECONDS)
            levels.append(
                {
                    "num_streams": count,
                    "first_stream_goes_on_seconds": spread(map(min, pauses)),
                    "last_stream_goes_on_seconds": spread(map(max, pauses)),
                    "num_texts": count * arguments.repeats,
                    "num_texts_changed": num_changed,
                }
            )
    return {"setting": flag, "standby_bytes": standbys, "levels": levels}


def measure_both(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the pauses of streams after a kill of the worker, with and without a standby worker."""
    return {"kind": "recovery", "settings": [measure(arguments, flag) for flag in ("--standby", "--no-standby")]}


_OPTIONS = {
    "checkpoint": (Path, "checkpoint directory"),
    "streams": ([1, 64], "concurrent streams"),
    "output-tokens": (200, "number of tokens in a completion"),
    "repeats": (2, "worker deaths for each number of streams"),
}
main = partial(run_program, "loadtest.scenarios.bench_recovery", __doc__, _OPTIONS, measure_both)


if __name__ == "__main__":
    raise SystemExit(main())
