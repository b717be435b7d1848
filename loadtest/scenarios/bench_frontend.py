"""Benchmark of the API process's cost per token: the whole service with an engine that computes nothing.

    python -m loadtest.scenarios.bench_frontend --checkpoint checkpoints/NAME --out docs/results/frontend.json

"tokens_per_second_on_one_core" is tokens divided by CPU time of the API process: JSON, events and socket writes. The
clients are a separate process. With an instant engine, several tokens of a stream leave in one write. With
`--step-ms`, at a pace that one core can follow, every token is written alone.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.client.workload import LoadRequest
from loadtest.measurement.benchmark_program import benchmark_parser, read_arguments, run_benchmark, show
from loadtest.measurement.spread import spread
from loadtest.scenarios.closed_and_open_loop import LoadRun, complete_all
from loadtest.scenarios.instant_engine import STEP_MS, serve_instantly
from loadtest.scenarios.service_process import ServiceProcess, cpu_seconds

_PROGRAM = "loadtest.scenarios.bench_frontend"
# The kernel counts CPU time in ticks: a shorter load counts as one tick.
_TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")


def _measure(service: ServiceProcess, num_streams: int, num_requests: int, num_tokens: int) -> tuple[float, LoadRun]:
    """Return the CPU seconds of the API process for one load, and the clients' outcomes."""
    requests = [
        LoadRequest(index=index, prompt="Once upon a time", max_tokens=num_tokens, temperature=0.0)
        for index in range(num_requests)
    ]
    processes = service.api_processes()
    before = cpu_seconds(processes)
    run = complete_all(service.target, requests, num_streams=num_streams)
    return max(cpu_seconds(processes) - before, _TICK_SECONDS), run


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every number of streams at every pace, after a warm-up load."""
    levels = []
    num_tokens = arguments.output_tokens
    for step_ms in arguments.step_ms:
        command = ["env", f"{STEP_MS}={step_ms}", sys.executable, "-m", _PROGRAM, "serve"]
        with ServiceProcess([*command, "--checkpoint", str(arguments.checkpoint)]) as service:
            service.wait_first_token()
            _measure(service, 1, arguments.requests_per_stream, num_tokens)
            for num_streams in arguments.streams:
                show(f"{num_streams} streams, {step_ms:g} ms between steps")
                count = num_streams * arguments.requests_per_stream
                loads = [_measure(service, num_streams, count, num_tokens) for _ in range(arguments.repeats)]
                tokens = count * num_tokens
                levels.append(
                    {
                        "step_ms": step_ms,
                        "num_streams": num_streams,
                        "num_requests": count,
                        "num_tokens": num_tokens,
                        "tokens_per_second_on_one_core": spread(tokens / seconds for seconds, _ in loads),
                        "cpu_us_per_token": spread(1e6 * seconds / tokens for seconds, _ in loads),
                        "tokens_per_second": spread(tokens / run.duration_seconds for _, run in loads),
                        "client_cpu_share": spread(run.client_cpu_share for _, run in loads),
                    }
                )
    return {"kind": "frontend", "levels": levels}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return the exit code: 0; 1 if the service failed."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["serve"]:
        return serve_instantly(given[1:])
    parser = benchmark_parser(_PROGRAM, "Measure the API process's CPU time per token.")
    add = parser.add_argument
    text = "checkpoint directory, for tokenizer and name"
    add("--checkpoint", type=Path, required=True, metavar="DIR", help=text)
    add("--streams", type=int, nargs="+", default=[1, 16, 64], metavar="N", help="default: 1 16 64")
    text = "time between steps, 0: instant (default: 0 4)"
    add("--step-ms", type=float, nargs="+", default=[0.0, 4.0], metavar="MS", help=text)
    for name, default in (("requests-per-stream", 8), ("output-tokens", 200), ("repeats", 3)):
        add(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")
    arguments = read_arguments(parser, given)
    return run_benchmark(parser, arguments, lambda: measure(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
