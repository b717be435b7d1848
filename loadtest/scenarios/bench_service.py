"""Benchmark of the whole service: start-up time, idle CPU, memory, and HTTP throughput relative to the engine alone."""

import argparse
import itertools
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.client.outcome import LoadRun
from loadtest.client.report import latencies_ms
from loadtest.client.sse_client import discover
from loadtest.client.workload import WorkloadSpec
from loadtest.inprocess.engine import EngineRun, InProcess
from loadtest.measurement.benchmark_program import run_program, show
from loadtest.measurement.figures import percentiles, ratio_spread, spread
from loadtest.scenarios.service_benchmark import ServiceProcess, complete_all, cpu_seconds, kvasir_serve, serve_settings

_IDLE_WINDOWS, _MIN_REQUESTS = 5, 4
# The worker may still clean up after the last request.
_SETTLE_SECONDS = 1.0


def measure_start(checkpoint: Path, serve: Sequence[str]) -> float:
    """Return the seconds from the start of `kvasir serve` to the first token of its first stream."""
    with ServiceProcess(kvasir_serve(checkpoint, serve)) as service:
        return service.wait_first_token()


def measure_idle(service: ServiceProcess, seconds: float) -> dict[str, Any]:
    """Return the CPU use of an idle service in percent of one core: of its worker, and of all its processes."""
    time.sleep(_SETTLE_SECONDS)
    parts = {"worker": service.processes("worker"), "service": service.processes()}
    shares: dict[str, list[float]] = {part: [] for part in parts}
    for _ in range(_IDLE_WINDOWS):
        before = {part: cpu_seconds(processes) for part, processes in parts.items()}
        began = time.perf_counter()
        time.sleep(seconds / _IDLE_WINDOWS)
        wall = time.perf_counter() - began
        for part, processes in parts.items():
            shares[part].append(100 * (cpu_seconds(processes) - before[part]) / wall)
    return {f"{part}_cpu_percent": spread(values) for part, values in shares.items()}


def measure_footprint(service: ServiceProcess) -> list[dict[str, Any]]:
    """Return, per process of the service: name, resident MB (10^6 bytes), number of threads, and if torch is loaded."""
    return [
        {
            "part": process.name().removeprefix("kvasir-"),
            "rss_mb": process.memory_info().rss / 1e6,
            "threads": process.num_threads(),
            "torch": any("libtorch" in region.path for region in process.memory_maps()),
        }
        for process in service.processes()
    ]


def summarize(num_streams: int, http: Sequence[LoadRun], engine: Sequence[EngineRun]) -> dict[str, Any]:
    """Return the statistics of repeated loads with one number of streams. Latencies are pooled over the repeats."""
    http_rates, engine_rates = ([run.tokens_per_second for run in runs] for runs in (http, engine))
    outcomes = [outcome for run in http for outcome in run.outcomes]
    return {
        "streams": num_streams,
        "requests": len(http[0].outcomes),
        "prompt_tokens": spread(outcome.prompt_tokens for outcome in outcomes),
        "http_tokens_per_second": spread(http_rates),
        "engine_tokens_per_second": spread(engine_rates),
        "ratio": ratio_spread(http_rates, engine_rates),
        "client_cpu_share": spread(run.client_cpu_share for run in http),
        **{f"http_{name}_ms": percentiles(latencies_ms(outcomes)[name], (50, 95, 99)) for name in ("ttft", "itl")},
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure starts, idle CPU, throughput of service and engine in turn, and memory; return the figures."""
    settings = serve_settings(arguments)
    show("start")
    starts = [measure_start(arguments.checkpoint, arguments.serve) for _ in range(arguments.start_repeats)]
    with ServiceProcess(kvasir_serve(arguments.checkpoint, arguments.serve)) as service:
        service.wait_first_token()
        show("idle")
        idle = measure_idle(service, arguments.idle_seconds)
        contestant = InProcess.open(settings)
        workload = {name: getattr(arguments, name) for name in ("prompt_tokens", "output_tokens")}
        spec = WorkloadSpec(**workload, temperature=0.0)
        numbered = map(discover(service.target, spec)[1].request, itertools.count())

        def measure_both(num_streams: int, num_requests: int) -> tuple[LoadRun, EngineRun]:
            """Run the same new requests over HTTP in the service and without HTTP in the engine, once each."""
            requests = list(itertools.islice(numbered, num_requests))
            http = complete_all(service.target, requests, num_streams=num_streams)
            tokenized = (service.target.fetch_json("/tokenize", {"prompt": request.prompt}) for request in requests)
            prompts = [each["tokens"] for each in tokenized]
            return http, contestant.complete(prompts, arguments.output_tokens, num_streams=num_streams)

        measure_both(4, 8)  # warm-up of service and engine
        runs: dict[int, list[tuple[LoadRun, EngineRun]]] = {streams: [] for streams in arguments.streams}
        for _, streams in itertools.product(range(arguments.repeats), arguments.streams):
            show(f"{streams} streams")
            count = max(arguments.requests_per_stream * streams, _MIN_REQUESTS)
            runs[streams].append(measure_both(streams, count))
        footprint = measure_footprint(service)
    return {
        "kind": "service",
        "model": contestant.facts,
        "settings": {"serve": arguments.serve, "workload": workload},
        "start_seconds": spread(starts),
        "idle": idle,
        "processes": footprint,
        "levels": [summarize(streams, *zip(*pairs, strict=True)) for streams, pairs in runs.items()],
    }


_OPTIONS = {
    "checkpoint": (Path, "checkpoint directory"),
    "streams": ([1, 4, 16, 64], "concurrent streams"),
    "repeats": (5, "repeats of each throughput measurement"),
    "start-repeats": (5, "starts of the service"),
    "requests-per-stream": (2, "requests per stream"),
    "prompt-tokens": (64, "approximate number of tokens in a prompt"),
    "output-tokens": (64, "number of tokens in a completion"),
    "idle-seconds": (10.0, "length of the idle measurement in seconds"),
}
main = partial(run_program, "loadtest.scenarios.bench_service", __doc__, _OPTIONS, measure)


if __name__ == "__main__":
    raise SystemExit(main())
