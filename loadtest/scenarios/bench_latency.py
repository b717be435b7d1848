"""Benchmark of latency under mixed load: a short prompt among streams, and streams during a long prompt. Over HTTP.

    python -m loadtest.scenarios.bench_latency --out docs/results/latency.json -- --dtype bfloat16

The TTFT of a short prompt is counted in engine steps: tokens that a stream received meanwhile. The streams' ITL during
a long prompt is compared with their ITL right before. Each `--max-batched-tokens` is measured as the only limit, and
each `--prompt-slowdown`. Prompts are random tokens. Arguments after `--` go to `kvasir serve`.
"""

import argparse
import asyncio
import contextlib
import gc
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from loadtest.client.outcome import Ending
from loadtest.client.sse_client import AsyncClient, CompletionReader, Target
from loadtest.client.workload import LoadRequest
from loadtest.measurement.benchmark_program import benchmark_parser, read_arguments, run_benchmark, show
from loadtest.measurement.model_shapes import SHAPE_SIZES, write_random_checkpoint
from loadtest.measurement.spread import ratio_spread, spread
from loadtest.scenarios.service_process import ServiceFailed, ServiceProcess, kvasir_serve
from service.config.settings import ModelSettings

_CONTEXT = 8192
_SHORT_TOKENS = 16
_DEFAULT_BUDGET: int = ModelSettings.model_fields["max_batched_tokens"].default
_DEFAULT_SLOWDOWN: float = ModelSettings.model_fields["prompt_slowdown"].default
# Time for which the streams run alone before each arrival.
_QUIET_SECONDS = 0.5
_POLL_SECONDS = 0.005


def steps_between(streams: Sequence[Sequence[float]], start: float, end: float) -> int:
    """Return the engine steps from `start` (excluded) to `end`: the tokens of the stream that got most."""
    return max(sum(start < at <= end for at in seconds) for seconds in streams)


def gaps_within(streams: Sequence[Sequence[float]], start: float, end: float) -> list[float]:
    """Return the token gaps of all streams that end after `start` and begin before `end`."""
    pairs = (pair for seconds in streams for pair in itertools.pairwise(seconds))
    return [later - earlier for earlier, later in pairs if later > start and earlier < end]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptArrival:
    """One arrival. steps: engine steps until its first token. before, during: gaps of the streams, in seconds."""

    ttft_seconds: float
    steps: int
    before: list[float]
    during: list[float]


def summarize(arrivals: Sequence[PromptArrival]) -> dict[str, Any]:
    """Return a JSON-ready dictionary: a value per arrival, gaps as their 99th percentiles (nearest rank)."""
    before, during = (
        [1e3 * float(np.percentile(gaps, 99, method="inverted_cdf")) for gaps in sides]
        for sides in zip(*((arrival.before, arrival.during) for arrival in arrivals), strict=True)
    )
    return {
        "ttft_ms": spread(1e3 * arrival.ttft_seconds for arrival in arrivals),
        "steps": spread(float(arrival.steps) for arrival in arrivals),
        "itl_p50_ms_before": 1e3 * statistics.median(gap for arrival in arrivals for gap in arrival.before),
        "itl_p99_ms_before": spread(before),
        "itl_p99_ms_during": spread(during),
        "itl_p99_ratio": ratio_spread(during, before),
    }


class ArrivalLoad(NamedTuple):
    """A number of streams, and prompts that arrive one after the other."""

    num_streams: int
    prompt_tokens: int
    num_arrivals: int
    seed: int


async def measure(target: Target, load: ArrivalLoad, *, vocab_size: int) -> list[PromptArrival]:
    """Let prompts arrive while streams decode, at random moments of a step."""
    rng, seen = random.Random(load.seed), []
    client = AsyncClient(target, timeout_seconds=3600)

    def request(num_tokens: int, max_tokens: int) -> LoadRequest:
        # Random ids, which no cache holds. The vocabulary's last id is left out: it may end a text.
        prompt = [rng.randrange(vocab_size - 1) for _ in range(num_tokens)]
        seed = rng.randrange(2**31)
        return LoadRequest(index=0, prompt=prompt, max_tokens=max_tokens, seed=seed, return_token_ids=True)

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        times = []
        for _ in range(load.num_streams):  # one by one: together they would exceed the queue limit
            reader = CompletionReader(request(_SHORT_TOKENS, _CONTEXT - 2 * _SHORT_TOKENS))
            task = asyncio.create_task(client.complete(reader, model=None))
            stack.callback(task.cancel)
            while not reader.chunk_seconds:
                if task.done():
                    raise ServiceFailed(f"a stream ended without a token: {task.result().detail}")
                await asyncio.sleep(_POLL_SECONDS)
            times.append(reader.chunk_seconds)
        for _ in range(load.num_arrivals):
            began = time.perf_counter()
            await asyncio.sleep(_QUIET_SECONDS * rng.uniform(1.0, 1.5))
            arrival = await client.complete(request(load.prompt_tokens, 1), model=None)
            if arrival.ending is not Ending.OK:
                raise ServiceFailed(f"a prompt ended with {arrival.ending.value}: {arrival.detail}")
            await asyncio.sleep(_QUIET_SECONDS)  # lets gaps that began before the first token end
            sent, first = arrival.sent_seconds, arrival.chunk_seconds[0]
            seen.append(
                PromptArrival(
                    ttft_seconds=first - sent,
                    steps=steps_between(times, sent, first),
                    before=gaps_within(times, began, sent),
                    during=gaps_within(times, sent, first),
                )
            )
    return seen


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure short prompts with the default settings, then long prompts with each limit."""
    vocab_size = SHAPE_SIZES[arguments.shape]["vocab_size"]
    short = ArrivalLoad(arguments.short_streams, _SHORT_TOKENS, arguments.short_arrivals, arguments.seed)
    long = ArrivalLoad(arguments.long_streams, arguments.prompt_tokens, arguments.arrivals, arguments.seed)

    def run(checkpoint: Path, load: ArrivalLoad, *flags: str) -> dict[str, Any]:
        show(" ".join([f"prompts of {load.prompt_tokens} tokens", *flags]))
        with ServiceProcess(kvasir_serve(checkpoint, [*arguments.serve, *flags])) as service:
            service.wait_first_token()
            # Warm up: the first long prompt touches memory for the first time.
            warm = ArrivalLoad(1, load.prompt_tokens, 1, load.seed + 1)
            asyncio.run(measure(service.target, warm, vocab_size=vocab_size))
            return summarize(asyncio.run(measure(service.target, load, vocab_size=vocab_size)))

    # None stands for no limit: JSON has no infinity.
    limits: list[tuple[int, float | None]] = [(budget, None) for budget in arguments.budgets]
    limits += [(_DEFAULT_BUDGET, slowdown) for slowdown in arguments.slowdowns]
    points = []
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as directory:
        checkpoint = write_random_checkpoint(Path(directory), arguments.shape, max_context_length=_CONTEXT)
        # Garbage collection takes 100 ms in a process with torch loaded, and would count as latency of the service.
        gc.collect()
        gc.freeze()
        shorts = {"streams": short.num_streams, "prompt_tokens": short.prompt_tokens} | run(checkpoint, short)
        for budget, slowdown in limits:
            flags = ["--max-batched-tokens", str(budget), "--max-num-running", str(min(budget, 64))]
            figures = run(checkpoint, long, *flags, "--prompt-slowdown", str(slowdown or "inf"))
            points.append({"max_batched_tokens": budget, "prompt_slowdown": slowdown} | figures)
    longs = {"streams": long.num_streams, "prompt_tokens": long.prompt_tokens, "points": points}
    return {"kind": "latency", "shape": arguments.shape, "serve": arguments.serve, "short": shorts, "long": longs}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return the exit code: 0; 1 if the service failed; 2 for invalid arguments."""
    parser = benchmark_parser(
        "loadtest.scenarios.bench_latency",
        "Measure TTFT while streams decode, and the effect of a long prompt on the streams' ITL.",
    )
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPE_SIZES), default="S", help="shape of the random model (default: %(default)s)")
    for name, default, text in (
        ("short-streams", 63, "streams during a short prompt"),
        ("short-arrivals", 12, "number of short prompts"),
        ("long-streams", 16, "streams during a long prompt"),
        ("arrivals", 3, "long prompts per limit"),
        ("prompt-tokens", 4096, "tokens of a long prompt"),
        ("seed", 0, "seed of prompts and arrival times"),
    ):
        add(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    text = "values of --max-batched-tokens, each above --long-streams (default: 64 to 1024)"
    add("--budgets", type=int, nargs="+", default=[64, 128, 256, 512, 1024], metavar="N", help=text)
    text = f"values of --prompt-slowdown, with --max-batched-tokens {_DEFAULT_BUDGET} (default: %(default)s)"
    add("--slowdowns", type=float, nargs="+", default=[_DEFAULT_SLOWDOWN], metavar="X", help=text)
    arguments = read_arguments(parser, argv)
    if min(arguments.budgets) <= arguments.long_streams:
        parser.error("--budgets: each value must be above --long-streams, to leave tokens for the prompt")
    return run_benchmark(parser, arguments, lambda: measure_all(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
