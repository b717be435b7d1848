"""Benchmark of the whole service: start, idle cost, footprint, and HTTP throughput relative to the engine.

    python -m loadtest.scenarios.bench_service --checkpoint checkpoints/NAME --out docs/results/service.json

HTTP throughput of `kvasir serve` and the throughput of the same engine in this process are measured in turn, with the
same prompts, settings and number of streams. Arguments after `--` go to the service and to the engine.
"""

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.client.service_discovery import discover, fetch_json
from loadtest.client.sse_client import Target
from loadtest.client.workload import LoadRequest, Workload, WorkloadSpec
from loadtest.inprocess.closed_loop import EngineRun, run_closed, submit_of
from loadtest.inprocess.engine import InProcess
from loadtest.measurement.benchmark_program import benchmark_parser, read_arguments, run_benchmark, show
from loadtest.measurement.spread import ratio_spread, spread
from loadtest.scenarios.closed_and_open_loop import LoadRun, complete_all
from loadtest.scenarios.service_process import ServiceProcess, cpu_seconds, has_torch, kvasir_serve
from model.sampling.params import SamplingParams
from service.config.settings import ServeSettings, read_settings
from service.ipc.messages import Submit

IDLE_WINDOWS = 5
# The worker may still clean up after the last request.
_SETTLE_SECONDS = 1.0
_WORKLOAD_FACTS = ("prompt_tokens", "output_tokens", "temperature", "ignore_eos", "seed")


def measure_start(checkpoint: Path, serve: Sequence[str]) -> float:
    """Return the seconds from the start of the process to the first token of its first stream."""
    with ServiceProcess(kvasir_serve(checkpoint, serve)) as service:
        return service.wait_first_token()


def measure_idle(service: ServiceProcess, seconds: float) -> dict[str, Any]:
    """Return the CPU use of an idle service in percent of a core: of the worker, and of all its processes."""
    time.sleep(_SETTLE_SECONDS)
    parts = {"worker": service.worker_processes(), "service": service.all_processes()}
    shares: dict[str, list[float]] = {part: [] for part in parts}
    for _ in range(IDLE_WINDOWS):
        before = {part: cpu_seconds(processes) for part, processes in parts.items()}
        began = time.perf_counter()
        time.sleep(seconds / IDLE_WINDOWS)
        wall = time.perf_counter() - began
        for part, processes in parts.items():
            shares[part].append(100 * (cpu_seconds(processes) - before[part]) / wall)
    return {f"{part}_cpu_percent": spread(values) for part, values in shares.items()}


def measure_footprint(service: ServiceProcess) -> list[dict[str, Any]]:
    """Return for each process its part, resident memory in MB (10^6 bytes), threads, and whether torch is mapped."""
    parts = dict.fromkeys(service.all_processes(), "other") | {service.process: "main"}
    parts |= dict.fromkeys(service.worker_processes(), "worker") | dict.fromkeys(service.api_processes(), "api")
    return [
        {
            "part": part,
            "rss_mb": process.memory_info().rss / 1e6,
            "threads": process.num_threads(),
            "torch": has_torch(process),
        }
        for process, part in parts.items()
    ]


def summarize(num_streams: int, http: Sequence[LoadRun], engine: Sequence[EngineRun]) -> dict[str, Any]:
    """Return the figures of one number of streams, measured several times. Latencies are pooled over the repeats."""
    http_rates, engine_rates = ([run.tokens_per_second for run in runs] for runs in (http, engine))
    outcomes = [outcome for run in http for outcome in run.outcomes]
    lengths = [outcome.prompt_tokens for outcome in outcomes]
    return {
        "streams": num_streams,
        "requests": len(http[0].outcomes),
        "prompt_tokens": {"median": float(np.median(lengths)), "min": min(lengths), "max": max(lengths)},
        "http_tokens_per_second": spread(http_rates),
        "engine_tokens_per_second": spread(engine_rates),
        "ratio": ratio_spread(http_rates, engine_rates),
        "client_cpu_share": spread(run.client_cpu_share for run in http),
        "http_ttft_ms": _percentiles([o.ttft_seconds for o in outcomes if o.ttft_seconds is not None]),
        "engine_ttft_ms": _percentiles([seconds for run in engine for seconds in run.ttft_seconds]),
        "http_itl_ms": _percentiles([gap for outcome in outcomes for gap in outcome.itl_seconds]),
        "http_e2e_ms": _percentiles([outcome.e2e_seconds for outcome in outcomes]),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    percentiles = {"p50": 50, "p95": 95, "p99": 99}
    return {name: 1e3 * float(np.percentile(seconds, p)) if seconds else None for name, p in percentiles.items()}


def _submit(target: Target, request: LoadRequest) -> Submit:
    """Return the request as the API process would hand it to the engine. The service tokenizes the prompt."""
    params = SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
    )
    return submit_of(
        f"bench-{request.index}", fetch_json(target, "/tokenize", {"prompt": request.prompt})["tokens"], params
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements, in the order in which they disturb each other least."""
    flags = ["--checkpoint", str(arguments.checkpoint), *arguments.serve]
    settings = read_settings(ServeSettings, flags, command="serve", summary="")
    show("start")
    starts = [measure_start(arguments.checkpoint, arguments.serve) for _ in range(arguments.start_repeats)]
    with ServiceProcess(kvasir_serve(arguments.checkpoint, arguments.serve)) as service:
        service.wait_first_token()
        show("idle")
        idle = measure_idle(service, arguments.idle_seconds)
        contestant = InProcess.open(settings)
        spec = WorkloadSpec(
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
            max_context_tokens=contestant.max_context_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )
        numbered = map(Workload(spec, discover(service.target).passages).request, itertools.count())

        def measure_both(num_streams: int, num_requests: int, *, http_first: bool) -> tuple[LoadRun, EngineRun]:
            """Measure each side once, with the same fresh requests."""
            requests = list(itertools.islice(numbered, num_requests))
            submits = [_submit(service.target, request) for request in requests]
            if http_first:
                http = complete_all(service.target, requests, num_streams=num_streams)
            engine = run_closed(contestant.engine, submits, num_streams=num_streams)
            if not http_first:
                http = complete_all(service.target, requests, num_streams=num_streams)
            return http, engine

        measure_both(4, 8, http_first=True)  # warm-up of both sides
        runs: dict[int, list[tuple[LoadRun, EngineRun]]] = {streams: [] for streams in arguments.streams}
        for repeat, streams in itertools.product(range(arguments.repeats), arguments.streams):
            show(f"{streams} streams")
            count = max(arguments.requests_per_stream * streams, arguments.min_requests)
            runs[streams].append(measure_both(streams, count, http_first=repeat % 2 == 0))
        footprint = measure_footprint(service)
    workload = {name: getattr(spec, name) for name in _WORKLOAD_FACTS}
    return {
        "kind": "service",
        "model": contestant.facts,
        "settings": {"serve": arguments.serve, "workload": workload},
        "start_seconds": spread(starts),
        "idle": idle,
        "processes": footprint,
        "levels": [summarize(streams, *zip(*pairs, strict=True)) for streams, pairs in runs.items()],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return the exit code: 0; 1 if the service failed; 2 for invalid arguments."""
    parser = benchmark_parser(
        "loadtest.scenarios.bench_service", "Start the service and measure it against the engine in-process."
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint directory")
    text = "concurrent streams (default: 1 4 16 64)"
    add("--streams", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N", help=text)
    for name, default, text in (
        ("repeats", 5, "repeats of each throughput measurement"),
        ("start-repeats", 5, "repeats of the start"),
        ("requests-per-stream", 2, "requests per stream"),
        ("min-requests", 4, "minimum requests"),
        ("prompt-tokens", 64, "approximate tokens of a prompt"),
        ("output-tokens", 64, "tokens of a completion"),
        ("seed", 0, "seed of the workload"),
        ("temperature", 0.0, "sampling temperature"),
        ("idle-seconds", 10.0, "length of the idle measurement in seconds"),
    ):
        add(f"--{name}", type=type(default), default=default, metavar="N", help=f"{text} (default: {default:g})")
    arguments = read_arguments(parser, argv)
    return run_benchmark(parser, arguments, lambda: measure(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
