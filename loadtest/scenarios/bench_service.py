"""Benchmark of the whole service: start, idle cost, footprint, and HTTP throughput relative to the engine.

    python -m loadtest.scenarios.bench_service --checkpoint checkpoints/NAME --out docs/results/service.json

It starts `kvasir serve` on a free port. HTTP throughput and the throughput of the same engine in this process are
measured in turn, with the same prompts, lengths, settings and number of streams. Their ratio is the cost of HTTP,
queues and tokenization. The side that is not measured is idle.

Arguments after `--` go to `kvasir serve` and to the engine in this process.
"""

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.progress import Progress

from loadtest.client.outcome import Ending
from loadtest.client.service_discovery import discover, fetch_json
from loadtest.client.sse_client import AsyncClient, Target
from loadtest.client.workload import CompletionRequest, Workload, WorkloadSpec
from loadtest.inprocess.bench_arguments import split_at_dashes
from loadtest.inprocess.closed_loop import EngineRun, run_closed
from loadtest.inprocess.engine import InProcess
from loadtest.measurement.provenance import provenance, quiet_or_warned, tell
from loadtest.measurement.spread import Spread
from loadtest.scenarios import bench_http
from loadtest.scenarios.service_process import ServiceFailed, ServiceProcess, cpu_seconds, has_torch
from model.sampling.params import SamplingParams
from service.config.settings import ServeSettings, SettingsError, read_settings
from service.ipc.messages import Submit

IDLE_WINDOWS = 5
# The worker may still clean up after the last request.
_SETTLE_SECONDS = 1.0
_FIRST_REQUEST = CompletionRequest(index=0, prompt="Once upon a time", max_tokens=1, temperature=0.0)


def measure_start(checkpoint: Path, serve: Sequence[str]) -> float:
    """Return the seconds from the start of the process to the first token of its first stream."""
    with ServiceProcess(checkpoint, serve) as service:
        return service.wait_first_token(_FIRST_REQUEST)


def measure_idle(service: ServiceProcess, seconds: float) -> dict[str, Any]:
    """Return the CPU use of an idle service in percent of a core: of the worker, and of all its processes."""
    time.sleep(_SETTLE_SECONDS)
    workers, processes = service.worker_processes(), service.all_processes()
    shares: dict[str, list[float]] = {"worker": [], "service": []}
    for _ in range(IDLE_WINDOWS):
        before = cpu_seconds(workers), cpu_seconds(processes)
        began = time.perf_counter()
        time.sleep(seconds / IDLE_WINDOWS)
        wall = time.perf_counter() - began
        after = cpu_seconds(workers), cpu_seconds(processes)
        shares["worker"].append(100 * (after[0] - before[0]) / wall)
        shares["service"].append(100 * (after[1] - before[1]) / wall)
    return {f"{name}_cpu_percent": Spread(tuple(values)).to_dict() for name, values in shares.items()}


def measure_footprint(service: ServiceProcess) -> list[dict[str, Any]]:
    """Return for each process its part, resident memory in MB (10^6 bytes), threads, and whether torch is mapped."""
    api, workers = service.api_processes(), service.worker_processes()

    def part(process: psutil.Process) -> str:
        if process in api:
            return "api"
        if process in workers:
            return "worker"
        return "main" if process == service.process else "other"

    return [
        {
            "part": part(process),
            "rss_mb": process.memory_info().rss / 1e6,
            "threads": process.num_threads(),
            "torch": has_torch(process),
        }
        for process in service.all_processes()
    ]


@dataclass(slots=True)
class Level:
    """A number of streams, measured several times over HTTP and in-process."""

    num_streams: int
    http: list[bench_http.Run] = field(default_factory=list)
    engine: list[EngineRun] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary. Latencies are pooled over the repeats."""
        http = [_throughput(run) for run in self.http]
        engine = [run.tokens_per_second for run in self.engine]
        outcomes = [outcome for run in self.http for outcome in run.outcomes]
        lengths = [outcome.prompt_tokens for outcome in outcomes]
        return {
            "streams": self.num_streams,
            "requests": len(self.http[0].outcomes),
            "prompt_tokens": {"median": float(np.median(lengths)), "min": min(lengths), "max": max(lengths)},
            "http_tokens_per_second": Spread(tuple(http)).to_dict(),
            "engine_tokens_per_second": Spread(tuple(engine)).to_dict(),
            "ratio": Spread.of_ratios(http, engine).to_dict(),
            "client_cpu_share": Spread(tuple(run.client_cpu_share for run in self.http)).to_dict(),
            "http_ttft_ms": _percentiles([o.ttft_seconds for o in outcomes if o.ttft_seconds is not None]),
            "engine_ttft_ms": _percentiles([s for run in self.engine for s in run.ttft_seconds]),
            "http_itl_ms": _percentiles([gap for o in outcomes for gap in o.itl_seconds]),
            "http_e2e_ms": _percentiles([o.e2e_seconds for o in outcomes]),
        }


def _throughput(run: bench_http.Run) -> float:
    return sum(outcome.completion_tokens for outcome in run.outcomes) / run.duration_seconds


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    names = ("p50", "p95", "p99")
    if not seconds:
        return dict.fromkeys(names)
    return dict(zip(names, (float(v) for v in 1e3 * np.percentile(seconds, (50, 95, 99))), strict=True))


class Contest:
    """Alternating measurements of the service over HTTP and the engine in-process."""

    def __init__(self, target: Target, contestant: InProcess, workload: Workload) -> None:
        self._target = target
        self._contestant = contestant
        self._workload = workload
        self._indexes = itertools.count()

    def round(self, level: Level, num_requests: int, *, http_first: bool) -> None:
        """Measure each side once, with the same fresh requests."""
        requests = [self._workload.request(next(self._indexes)) for _ in range(num_requests)]
        submits = [self._submit(request) for request in requests]
        if http_first:
            level.http.append(self._http(requests, level.num_streams))
        level.engine.append(run_closed(self._contestant.engine, submits, num_streams=level.num_streams))
        if not http_first:
            level.http.append(self._http(requests, level.num_streams))

    def _http(self, requests: Sequence[CompletionRequest], num_streams: int) -> bench_http.Run:
        async def run() -> bench_http.Run:
            client = AsyncClient(self._target)
            done = await bench_http.run_closed(client, requests, model=None, num_streams=num_streams)
            await client.close()
            return done

        done = asyncio.run(run())
        for outcome in done.outcomes:
            if outcome.ending is not Ending.OK:
                raise ServiceFailed(f"request {outcome.index}: {outcome.ending.value}: {outcome.detail}")
        return done

    def _submit(self, request: CompletionRequest) -> Submit:
        """Return the request as the API process would hand it to the engine. The service tokenizes the prompt."""
        tokenized = fetch_json(self._target, "/tokenize", {"prompt": request.prompt})
        return Submit(
            uid=f"bench-{request.index}",
            attempt=0,
            prompt_token_ids=tuple(tokenized["tokens"]),
            prior_token_ids=(),
            params=SamplingParams(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=request.seed,
                ignore_eos=request.ignore_eos,
            ),
            arrival_seconds=time.monotonic(),
            deadline_seconds=None,
        )


def measure(arguments: argparse.Namespace, serve: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Run all measurements, in the order in which they disturb each other least."""
    settings = read_settings(
        ServeSettings,
        ["--checkpoint", str(arguments.checkpoint), *serve],
        command="serve",
        summary="",
    )
    rounds = arguments.repeats * len(arguments.streams)
    task = progress.add_task("start", total=arguments.start_repeats + 1 + rounds)
    starts = []
    for _ in range(arguments.start_repeats):
        starts.append(measure_start(arguments.checkpoint, serve))
        progress.advance(task)
    with ServiceProcess(arguments.checkpoint, serve) as service:
        service.wait_first_token(_FIRST_REQUEST)
        progress.update(task, description="idle")
        idle = measure_idle(service, arguments.idle_seconds)
        progress.advance(task)
        contestant = InProcess.open(settings)
        spec = WorkloadSpec(
            prompt_tokens=arguments.prompt_tokens,
            output_tokens=arguments.output_tokens,
            max_context_tokens=contestant.max_context_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )
        workload = Workload(spec, discover(service.target).passages)
        contest = Contest(service.target, contestant, workload)
        contest.round(Level(4), 8, http_first=True)  # warm-up of both sides
        levels = [Level(streams) for streams in arguments.streams]
        for repeat in range(arguments.repeats):
            for level in levels:
                progress.update(task, description=f"{level.num_streams} streams")
                count = arguments.requests_per_stream * level.num_streams
                contest.round(level, max(count, arguments.min_requests), http_first=repeat % 2 == 0)
                progress.advance(task)
        footprint = measure_footprint(service)
    return {
        "kind": "service",
        "model": contestant.facts,
        "settings": {"serve": list(serve), "workload": _spec_facts(spec)},
        "start_seconds": Spread(tuple(starts)).to_dict(),
        "idle": idle,
        "processes": footprint,
        "levels": [level.to_dict() for level in levels],
    }


def _spec_facts(spec: WorkloadSpec) -> dict[str, Any]:
    names = ("prompt_tokens", "output_tokens", "temperature", "ignore_eos", "seed")
    return {name: getattr(spec, name) for name in names}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.scenarios.bench_service",
        description="Start the service and measure it against the engine in-process.",
        epilog="Arguments after -- go to `kvasir serve` and to the engine in this process, for example: -- --threads 1",
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint directory")
    add("--out", type=Path, metavar="FILE", help="JSON output file (default: standard output)")
    add(
        "--streams",
        type=int,
        nargs="+",
        default=[1, 4, 16, 64],
        metavar="N",
        help="concurrent streams (default: 1 4 16 64)",
    )
    add(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="repeats of each throughput measurement (default: %(default)s)",
    )
    add("--start-repeats", type=int, default=5, metavar="N", help="repeats of the start (default: %(default)s)")
    add("--requests-per-stream", type=int, default=2, metavar="N", help="requests per stream (default: %(default)s)")
    add("--min-requests", type=int, default=4, metavar="N", help="minimum requests (default: %(default)s)")
    add(
        "--prompt-tokens",
        type=int,
        default=64,
        metavar="N",
        help="approximate tokens of a prompt (default: %(default)s)",
    )
    add("--output-tokens", type=int, default=64, metavar="N", help="tokens of a completion (default: %(default)s)")
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="sampling temperature (default: %(default)g, greedy)",
    )
    add(
        "--idle-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="length of the idle measurement (default: %(default)g)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the workload (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return the exit code: 0; 1 if the service failed; 2 for invalid arguments."""
    given = list(sys.argv[1:] if argv is None else argv)
    own, serve = split_at_dashes(given)
    parser = _parser()
    arguments = parser.parse_args(own)
    facts = provenance(parser.prog, given) | {"other_work_cores": quiet_or_warned(parser.prog)}
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            began = time.perf_counter()
            result = measure(arguments, serve, progress)
            result["took_seconds"] = round(time.perf_counter() - began, 1)
    except (SettingsError, ValueError) as error:
        parser.error(str(error))
    except ServiceFailed as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    tell(facts | result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
