"""Benchmark of the pause of streams after the worker is killed: SIGKILL to next token, with and without standby.

python -m loadtest.scenarios.bench_recovery --checkpoint checkpoints/kvasir-9m --out docs/results/recovery.json
"""

import argparse
import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from loadtest.client.outcome import Ending, Outcome
from loadtest.client.sse_client import AsyncClient, CompletionReader
from loadtest.client.workload import LoadRequest
from loadtest.measurement.benchmark_program import benchmark_parser, read_arguments, run_benchmark, show
from loadtest.measurement.spread import spread
from loadtest.scenarios.service_process import ServiceFailed, ServiceProcess, kvasir_serve

# Wait for processes that start after the service is ready, such as a standby.
_SETTLE_SECONDS = 4.0


def _named(service: ServiceProcess, name: str) -> list[psutil.Process]:
    return [process for process in service.all_processes() if process.name() == name]


async def _stream(service: ServiceProcess, count: int, num_tokens: int, *, kills: bool) -> tuple[list[Outcome], float]:
    """Run `count` streams. With `kills`, kill the worker when every stream has a third of its tokens.

    Returns the outcomes, and the time of the kill.
    """
    client = AsyncClient(service.target, timeout_seconds=300)
    readers = [
        CompletionReader(
            LoadRequest(index=number, prompt=f"There was a dog {number}", max_tokens=num_tokens, seed=number)
        )
        for number in range(count)
    ]
    streams = asyncio.gather(*(client.complete(reader, model=None) for reader in readers))
    while kills and any(len(reader.chunk_seconds) < num_tokens // 3 for reader in readers) and not streams.done():
        await asyncio.sleep(0.01)
    killed = time.perf_counter()
    if kills:
        (worker,) = _named(service, "kvasir-worker")
        worker.kill()
    outcomes = await streams
    await client.close()
    for outcome in outcomes:
        if outcome.ending is not Ending.OK:
            raise ServiceFailed(f"stream {outcome.index} ended with {outcome.ending.value}: {outcome.detail}")
    return outcomes, killed


def pause_after(killed: float, chunk_seconds: Sequence[float]) -> float:
    """Return the seconds from the kill to the token that ends the longest gap after it."""
    later = [killed, *(moment for moment in chunk_seconds if moment > killed)]
    gaps = {after - before: after - killed for before, after in itertools.pairwise(later)}
    return gaps[max(gaps)]


def measure(arguments: argparse.Namespace, flag: str) -> dict[str, Any]:
    """Measure the service with one setting: pauses for each number of streams, and the standby's memory.

    The service exits after more than five worker deaths in a minute: keep levels times repeats below that.
    """
    levels = []
    with ServiceProcess(kvasir_serve(arguments.checkpoint, [flag, *arguments.serve])) as service:
        service.wait_first_token()
        time.sleep(_SETTLE_SECONDS)
        standbys = [process.memory_full_info().uss for process in _named(service, "kvasir-standby")]
        for count in arguments.streams:
            show(f"{count} streams, {flag}")
            undisturbed, _ = asyncio.run(_stream(service, count, arguments.output_tokens, kills=False))
            firsts, lasts, num_changed = [], [], 0
            for _ in range(arguments.repeats):
                outcomes, killed = asyncio.run(_stream(service, count, arguments.output_tokens, kills=True))
                pairs = zip(outcomes, undisturbed, strict=True)
                num_changed += sum(outcome.text != other.text for outcome, other in pairs)
                pauses = [pause_after(killed, outcome.chunk_seconds) for outcome in outcomes]
                firsts.append(min(pauses))
                lasts.append(max(pauses))
                time.sleep(_SETTLE_SECONDS)
            levels.append(
                {
                    "num_streams": count,
                    "first_stream_goes_on_seconds": spread(firsts),
                    "last_stream_goes_on_seconds": spread(lasts),
                    "num_texts": count * arguments.repeats,
                    "num_texts_changed": num_changed,
                }
            )
    return {"setting": flag, "standby_bytes": standbys, "levels": levels}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return the exit code: 0; 1 if the service failed."""
    parser = benchmark_parser("loadtest.scenarios.bench_recovery", "Measure the streams' pause after a worker's death.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint directory")
    add("--streams", type=int, nargs="+", default=[1, 64], metavar="N", help="default: 1 64")
    add("--output-tokens", type=int, default=200, metavar="N", help="default: %(default)s")
    add("--repeats", type=int, default=2, metavar="N", help="default: %(default)s")
    arguments = read_arguments(parser, argv)

    def settings() -> dict[str, Any]:
        flags = ("--standby", "--no-standby")
        return {"kind": "recovery", "settings": [measure(arguments, flag) for flag in flags]}

    return run_benchmark(parser, arguments, settings)


if __name__ == "__main__":
    raise SystemExit(main())
