"""Benchmark of latency: TTFT of a short prompt while streams decode, and ITL of streams while a long prompt runs."""

import argparse
import gc
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gevent
import numpy as np

from loadtest.client.requests import LoadRequest
from loadtest.client.sse_client import CompletionClient, CompletionReader, Target
from loadtest.client.workload import random_prompt
from loadtest.measurement.benchmark_program import MeasurementFailed, run_program, show
from loadtest.measurement.figures import ratio_spread, spread
from loadtest.measurement.model_shapes import write_random_checkpoint
from loadtest.scenarios.service_benchmark import ServiceProcess, check_success, kvasir_serve
from model.checkpoint.manifest import read_manifest
from service.config.settings import ModelSettings

_SHAPE, _CONTEXT, _SHORT_TOKENS = "S", 8192, 16
_DEFAULT_BUDGET: int = ModelSettings.model_fields["max_batched_tokens"].default
_DEFAULT_SLOWDOWN: float = ModelSettings.model_fields["prompt_slowdown"].default
_QUIET_SECONDS = 0.5  # for which the streams run alone before each prompt arrives


def steps_between(streams: Sequence[Sequence[float]], start: float, end: float) -> int:
    """Return the number of engine steps between two times: the most tokens that any stream received between them."""
    return max(sum(start < at <= end for at in seconds) for seconds in streams)


def gaps_within(streams: Sequence[Sequence[float]], start: float, end: float) -> list[float]:
    """Return the seconds between tokens of all streams, for gaps that end after `start` and begin before `end`."""
    pairs = (pair for seconds in streams for pair in itertools.pairwise(seconds))
    return [later - earlier for earlier, later in pairs if later > start and earlier < end]


class PromptArrival(NamedTuple):
    """Latencies of one prompt that was sent while streams decode, and of these streams.

    ttft_seconds, steps: time and engine steps from the send to the first token of the prompt's completion.
    before, during: gaps between tokens of the streams, in seconds, before the send and from then to this first token.
    """

    ttft_seconds: float
    steps: int
    before: list[float]
    during: list[float]


def summarize(arrivals: Sequence[PromptArrival]) -> dict[str, Any]:
    """Return the statistics of prompt arrivals, JSON-ready. Gaps become 99th percentiles per arrival (nearest rank)."""
    sides = ([arrival.before for arrival in arrivals], [arrival.during for arrival in arrivals])
    before, during = ([1e3 * float(np.percentile(gaps, 99, method="inverted_cdf")) for gaps in side] for side in sides)
    return {
        "ttft_ms": spread(1e3 * arrival.ttft_seconds for arrival in arrivals),
        "steps": spread(float(arrival.steps) for arrival in arrivals),
        "itl_p50_ms_before": 1e3 * statistics.median(gap for arrival in arrivals for gap in arrival.before),
        "itl_p99_ms_before": spread(before),
        "itl_p99_ms_during": spread(during),
        "itl_p99_ratio": ratio_spread(during, before),
    }


def measure(
    target: Target, vocab_size: int, *, streams: int, prompt_tokens: int, num_arrivals: int, seed: int
) -> list[PromptArrival]:
    """Send prompts one by one, at random times, while streams decode. Return each prompt's and the streams' latencies.

    Raises MeasurementFailed if a stream ends before its first token, or if a prompt fails.
    """
    rng, seen = random.Random(seed), []
    client = CompletionClient(target, timeout_seconds=3600)

    def request(num_tokens: int, max_tokens: int) -> LoadRequest:
        prompt = random_prompt(rng, vocab_size, num_tokens)
        own_seed = rng.randrange(2**31)
        return LoadRequest(index=0, prompt=prompt, max_tokens=max_tokens, seed=own_seed, return_token_ids=True)

    times, greenlets = list[list[float]](), list[Any]()
    try:
        for _ in range(streams):  # one by one: together they would exceed the queue limit
            reader = CompletionReader(request(_SHORT_TOKENS, _CONTEXT - 2 * _SHORT_TOKENS))
            greenlets.append(gevent.spawn(client.read, reader))
            times.append(reader.outcome.chunk_seconds)
            while not times[-1]:
                if greenlets[-1].ready():
                    raise MeasurementFailed(f"a stream ended before its first token: {reader.outcome.detail}")
                gevent.sleep(0.005)
        for _ in range(num_arrivals):
            began = time.perf_counter()
            gevent.sleep(_QUIET_SECONDS * rng.uniform(1.0, 1.5))
            arrival = client.complete(request(prompt_tokens, 1))
            check_success([arrival])
            gevent.sleep(_QUIET_SECONDS)  # lets gaps that began before the first token end
            sent, first = arrival.sent_seconds, arrival.chunk_seconds[0]
            gaps = gaps_within(times, began, sent), gaps_within(times, sent, first)
            seen.append(PromptArrival(first - sent, steps_between(times, sent, first), *gaps))
    finally:
        gevent.killall(greenlets)
        client.close()
    return seen


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure short prompts with default settings, and long prompts with each limit on the tokens or time of a step."""
    if min(arguments.budgets) <= arguments.long_streams:
        raise ValueError("--budgets: each value must be above --long-streams, to leave tokens for the prompt")

    def run(checkpoint: Path, load: dict[str, int], num_arrivals: int, *flags: str) -> dict[str, Any]:
        show(" ".join([f"prompts of {load['prompt_tokens']} tokens", *flags]))
        vocab_size, seed = read_manifest(checkpoint).config.vocab_size, arguments.seed
        with ServiceProcess(kvasir_serve(checkpoint, [*arguments.serve, *flags])) as service:
            service.wait_first_token()
            # Warm up: the first long prompt touches memory for the first time.
            measure(service.target, vocab_size, **load | {"streams": 1}, num_arrivals=1, seed=seed + 1)
            return summarize(measure(service.target, vocab_size, **load, num_arrivals=num_arrivals, seed=seed))

    short = {"streams": arguments.short_streams, "prompt_tokens": _SHORT_TOKENS}
    long = {"streams": arguments.long_streams, "prompt_tokens": arguments.prompt_tokens}
    # None stands for no limit: JSON has no infinity.
    limits: list[tuple[int, float | None]] = [(budget, None) for budget in arguments.budgets]
    limits += [(_DEFAULT_BUDGET, slowdown) for slowdown in arguments.slowdowns]
    points = []
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as directory:
        checkpoint = write_random_checkpoint(Path(directory), _SHAPE, max_context_length=_CONTEXT)
        # Garbage collection takes 100 ms in a process with torch loaded, and would count as latency of the service.
        gc.collect()
        gc.freeze()
        short_figures = run(checkpoint, short, arguments.short_arrivals)
        for budget, slowdown in limits:
            flags = ["--max-batched-tokens", str(budget), "--max-num-running", str(min(budget, 64))]
            figures = run(checkpoint, long, arguments.arrivals, *flags, "--prompt-slowdown", str(slowdown or "inf"))
            points.append({"max_batched_tokens": budget, "prompt_slowdown": slowdown} | figures)
    parts = {"short": short | short_figures, "long": long | {"points": points}}
    return {"kind": "latency", "shape": _SHAPE, "serve": arguments.serve} | parts


_OPTIONS = {
    "short-streams": (63, "streams that decode while a short prompt arrives"),
    "short-arrivals": (12, "number of short prompts"),
    "long-streams": (16, "streams that decode while a long prompt arrives"),
    "arrivals": (3, "number of long prompts per value of a flag"),
    "prompt-tokens": (4096, "number of tokens in a long prompt"),
    "seed": (0, "seed of prompts and arrival times"),
    "budgets": ([64, 128, 256, 512, 1024], "values of --max-batched-tokens, each above --long-streams"),
    "slowdowns": ([_DEFAULT_SLOWDOWN], f"values of --prompt-slowdown, with --max-batched-tokens {_DEFAULT_BUDGET}"),
}
main = partial(run_program, "loadtest.scenarios.bench_latency", __doc__, _OPTIONS, measure_all)


if __name__ == "__main__":
    raise SystemExit(main())
