"""Benchmark of the API process's cost per token: the whole service with an engine that computes nothing.

    python -m loadtest.scenarios.bench_frontend --checkpoint checkpoints/NAME --out docs/results/frontend.json

The engine returns the same token for every sequence, at once or at a set pace. What remains is JSON,
server-sent events and socket writes. All of it runs in the API process, except the engine's own messages.

"tokens_per_second_on_one_core" is tokens divided by CPU time of the API process: its throughput with a core to
itself. The clients are a separate process.

Steps of an engine faster than the API process pile up, so several tokens of a stream leave in one write, each as
its own event. With `--step-ms`, at a pace that one core can follow, every token is written alone.
"""

import argparse
import asyncio
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.client.outcome import Ending
from loadtest.client.sse_client import AsyncClient, Target
from loadtest.client.workload import CompletionRequest
from loadtest.measurement.provenance import provenance, quiet_or_warned, tell
from loadtest.measurement.spread import Spread
from loadtest.scenarios import bench_http
from loadtest.scenarios.instant_engine import STEP_MS, serve_instantly
from loadtest.scenarios.service_process import ServiceFailed, ServiceProcess, cpu_seconds

# The kernel counts CPU time in ticks: a shorter load counts as one tick.
_TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")
_FIRST_REQUEST = CompletionRequest(index=0, prompt="Once upon a time", max_tokens=1, temperature=0.0)


class InstantService(ServiceProcess):
    """The service with `loadtest.scenarios.instant_engine` in its worker."""

    def __init__(self, checkpoint: Path, step_ms: float) -> None:
        super().__init__(checkpoint)
        kvasir_serve = 2
        program = ["env", f"{STEP_MS}={step_ms}", sys.executable, "-m", "loadtest.scenarios.bench_frontend", "serve"]
        self.command = [*program, *self.command[kvasir_serve:]]


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Concurrent streams, requests in total, and tokens of each completion."""

    num_streams: int
    num_requests: int
    num_tokens: int


def measure(service: ServiceProcess, load: Load) -> tuple[float, bench_http.Run]:
    """Return the CPU seconds of the API process for one load, and the clients' outcomes.

    Raises:
        ServiceFailed: a completion was not complete.
    """
    processes = service.api_processes()
    before = cpu_seconds(processes)
    run = asyncio.run(_ask(service.target, load))
    spent = max(cpu_seconds(processes) - before, _TICK_SECONDS)
    for outcome in run.outcomes:
        if outcome.ending is not Ending.OK or outcome.completion_tokens != load.num_tokens:
            raise ServiceFailed(f"request {outcome.index}: {outcome.ending.value}: {outcome.detail}")
    return spent, run


async def _ask(target: Target, load: Load) -> bench_http.Run:
    client = AsyncClient(target)
    requests = [
        CompletionRequest(index=i, prompt="Once upon a time", max_tokens=load.num_tokens, temperature=0.0)
        for i in range(load.num_requests)
    ]
    run = await bench_http.run_closed(client, requests, model=None, num_streams=load.num_streams)
    await client.close()
    return run


def measure_all(checkpoint: Path, step_ms: float, levels: Sequence[Load], repeats: int) -> list[dict[str, Any]]:
    """Measure every level `repeats` times, after a warm-up load."""
    results = []
    with InstantService(checkpoint, step_ms) as service:
        service.wait_first_token(_FIRST_REQUEST)
        measure(service, levels[0])
        for load in levels:
            spent, runs = zip(*(measure(service, load) for _ in range(repeats)), strict=True)
            tokens = load.num_requests * load.num_tokens
            results.append(
                {"step_ms": step_ms}
                | dataclasses.asdict(load)
                | {
                    "tokens_per_second_on_one_core": Spread(tuple(tokens / seconds for seconds in spent)).to_dict(),
                    "cpu_us_per_token": Spread(tuple(1e6 * seconds / tokens for seconds in spent)).to_dict(),
                    "tokens_per_second": Spread(tuple(tokens / run.duration_seconds for run in runs)).to_dict(),
                    "client_cpu_share": Spread(tuple(run.client_cpu_share for run in runs)).to_dict(),
                }
            )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return the exit code: 0; 1 if the service failed."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["serve"]:
        return serve_instantly(given[1:])
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.scenarios.bench_frontend", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint directory, for tokenizer and name"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there (default: standard output)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64], metavar="N", help="default: 1 16 64")
    parser.add_argument(
        "--step-ms",
        type=float,
        nargs="+",
        default=[0.0, 4.0],
        metavar="MS",
        help="time between steps, 0: instant (default: 0 4)",
    )
    parser.add_argument("--requests-per-stream", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=200, metavar="N", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args(given)
    began = time.perf_counter()
    facts = provenance(parser.prog, given) | {"other_work_cores": quiet_or_warned(parser.prog)}
    levels = [Load(n, n * arguments.requests_per_stream, arguments.output_tokens) for n in arguments.streams]
    try:
        paces = [measure_all(arguments.checkpoint, pace, levels, arguments.repeats) for pace in arguments.step_ms]
    except ServiceFailed as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    took = {"took_seconds": round(time.perf_counter() - began, 1)}
    tell(facts | took | {"kind": "frontend", "levels": [*itertools.chain(*paces)]}, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
