"""Benchmark of latency under mixed load: a short prompt among streams, and streams during a long prompt. Over HTTP.

    python -m loadtest.scenarios.bench_latency --out docs/results/latency.json --plot docs/latency.png -- \\
        --dtype bfloat16

A short prompt that arrives while other streams decode waits for the running step and for its own step. Its TTFT is
counted in steps: tokens that a stream received meanwhile.

A long prompt makes steps longer while its chunks are computed. The streams' ITL in that time is reported beside
their ITL right before, with the TTFT of the prompt. This is measured with each `--max-batched-tokens` as the only
limit, and with each `--prompt-slowdown`.

Prompts are random tokens, and no two are alike. Arguments after `--` go to `kvasir serve`.
"""

import argparse
import asyncio
import gc
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from loadtest.client.sse_client import Target
from loadtest.client.workload import CompletionRequest
from loadtest.inprocess.bench_arguments import split_at_dashes
from loadtest.measurement.model_shapes import write_random_checkpoint
from loadtest.measurement.provenance import provenance, quiet_or_warned, tell
from loadtest.measurement.shape_names import SHAPE_SIZES
from loadtest.measurement.spread import Spread
from loadtest.scenarios.latency_plot import draw
from loadtest.scenarios.service_process import ServiceFailed, ServiceProcess
from loadtest.scenarios.steady_streams import Stream, random_prompt
from loadtest.scenarios.stream_gaps import gaps_within, percentile, steps_between
from service.config.settings import ModelSettings

_CONTEXT = 8192
_SHORT_TOKENS = 16
_FIRST_REQUEST = CompletionRequest(index=0, prompt="Once upon a time", max_tokens=1, temperature=0.0)
_DEFAULT_BUDGET: int = ModelSettings.model_fields["max_batched_tokens"].default
_DEFAULT_SLOWDOWN: float = ModelSettings.model_fields["prompt_slowdown"].default
# Time for which the streams run alone before each arrival.
_QUIET_SECONDS = 0.5


@dataclass(slots=True)
class Arrivals:
    """Figures of several arrivals, one after the other.

    steps: engine steps until the first token of each arrival. before, during: gaps of the streams, in seconds.
    """

    ttft_seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    before: list[list[float]] = field(default_factory=list)
    during: list[list[float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary: a value per arrival, gaps as their 99th percentiles."""
        before = [1e3 * percentile(gaps, 0.99) for gaps in self.before]
        during = [1e3 * percentile(gaps, 0.99) for gaps in self.during]
        return {
            "ttft_ms": Spread(tuple(1e3 * seconds for seconds in self.ttft_seconds)).to_dict(),
            "steps": Spread(tuple(map(float, self.steps))).to_dict(),
            "itl_p50_ms_before": 1e3 * statistics.median(gap for gaps in self.before for gap in gaps),
            "itl_p99_ms_before": Spread(tuple(before)).to_dict(),
            "itl_p99_ms_during": Spread(tuple(during)).to_dict(),
            "itl_p99_ratio": Spread.of_ratios(during, before).to_dict(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A number of streams, and prompts that arrive one after the other."""

    num_streams: int
    prompt_tokens: int
    num_arrivals: int
    seed: int


async def measure(target: Target, load: Load, *, vocab_size: int) -> Arrivals:
    """Let prompts arrive while streams decode, at random moments of a step."""
    rng, seen = random.Random(load.seed), Arrivals()

    def stream(num_tokens: int, max_tokens: int) -> Stream:
        prompt = random_prompt(rng, num_tokens, vocab_size)
        return Stream(target, prompt, max_tokens, seed=rng.randrange(2**31))

    others: list[Stream] = []
    try:
        for _ in range(load.num_streams):  # one by one: together they would exceed the queue limit
            others.append(stream(_SHORT_TOKENS, _CONTEXT - 2 * _SHORT_TOKENS))
            await others[-1].begin()
        for _ in range(load.num_arrivals):
            began = time.perf_counter()
            await asyncio.sleep(_QUIET_SECONDS * rng.uniform(1.0, 1.5))
            arrival = stream(load.prompt_tokens, 1)
            first = await arrival.begin()
            await asyncio.sleep(_QUIET_SECONDS)  # lets gaps that began before the first token end
            await arrival.leave()
            times = [other.seconds for other in others]
            seen.ttft_seconds.append(first - arrival.sent_seconds)
            seen.steps.append(steps_between(times, arrival.sent_seconds, first))
            seen.before.append(gaps_within(times, began, arrival.sent_seconds))
            seen.during.append(gaps_within(times, arrival.sent_seconds, first))
    finally:
        await asyncio.gather(*(other.leave() for other in others))
    return seen


def measure_all(arguments: argparse.Namespace, serve: Sequence[str], checkpoint: Path) -> dict[str, Any]:
    """Measure short prompts with the default settings, then long prompts with each limit."""
    vocab_size = SHAPE_SIZES[arguments.shape]["vocab_size"]
    short = Load(
        num_streams=arguments.short_streams,
        prompt_tokens=_SHORT_TOKENS,
        num_arrivals=arguments.short_arrivals,
        seed=arguments.seed,
    )
    long = Load(
        num_streams=arguments.long_streams,
        prompt_tokens=arguments.prompt_tokens,
        num_arrivals=arguments.arrivals,
        seed=arguments.seed,
    )

    def run(load: Load, flags: Sequence[str]) -> dict[str, Any]:
        with ServiceProcess(checkpoint, [*serve, *flags]) as service:
            service.wait_first_token(_FIRST_REQUEST)
            # Warm up: the first long prompt touches memory for the first time.
            warm = Load(num_streams=1, prompt_tokens=load.prompt_tokens, num_arrivals=1, seed=load.seed + 1)
            asyncio.run(measure(service.target, warm, vocab_size=vocab_size))
            return asyncio.run(measure(service.target, load, vocab_size=vocab_size)).to_dict()

    # None stands for no limit: JSON has no infinity.
    bounds: list[tuple[int, float | None]] = [(budget, None) for budget in arguments.budgets]
    bounds += [(_DEFAULT_BUDGET, slowdown) for slowdown in arguments.slowdowns]
    points = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("short prompts", total=1 + len(bounds))
        result = {"short": {"streams": short.num_streams, "prompt_tokens": short.prompt_tokens} | run(short, ())}
        for budget, slowdown in bounds:
            progress.update(task, advance=1, description=f"budget {budget}, slowdown {slowdown or 'inf'}")
            flags = ["--max-batched-tokens", str(budget), "--max-num-running", str(min(budget, 64))]
            flags += ["--prompt-slowdown", str(slowdown or "inf")]
            points.append({"max_batched_tokens": budget, "prompt_slowdown": slowdown} | run(long, flags))
    facts = {"streams": long.num_streams, "prompt_tokens": long.prompt_tokens, "points": points}
    return {"kind": "latency", "shape": arguments.shape, "serve": list(serve), **result, "long": facts}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.scenarios.bench_latency",
        description="Measure TTFT while streams decode, and the effect of a long prompt on the streams' ITL.",
        epilog="Arguments after -- go to `kvasir serve`, for example: -- --dtype bfloat16",
    )
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPE_SIZES), default="S", help="shape of the random model (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="write the JSON there (default: standard output)")
    add("--plot", type=Path, metavar="FILE", help="PNG output file: streams' slowdown over TTFT")
    add(
        "--short-streams",
        type=int,
        default=63,
        metavar="N",
        help="streams during a short prompt (default: %(default)s)",
    )
    add("--short-arrivals", type=int, default=12, metavar="N", help="number of short prompts (default: %(default)s)")
    add("--long-streams", type=int, default=16, metavar="N", help="streams during a long prompt (default: %(default)s)")
    add("--arrivals", type=int, default=3, metavar="N", help="long prompts per limit (default: %(default)s)")
    add("--prompt-tokens", type=int, default=4096, metavar="N", help="tokens of a long prompt (default: %(default)s)")
    add(
        "--budgets",
        type=int,
        nargs="+",
        default=[64, 128, 256, 512, 1024],
        metavar="N",
        help="values of --max-batched-tokens, each above --long-streams (default: 64 to 1024)",
    )
    add(
        "--slowdowns",
        type=float,
        nargs="+",
        default=[_DEFAULT_SLOWDOWN],
        metavar="X",
        help=f"values of --prompt-slowdown, with --max-batched-tokens {_DEFAULT_BUDGET} (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts and arrival times (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write JSON, draw. Return the exit code: 0; 1 if the service failed; 2 for invalid arguments."""
    given = list(sys.argv[1:] if argv is None else argv)
    own, serve = split_at_dashes(given)
    parser = _parser()
    arguments = parser.parse_args(own)
    if min(arguments.budgets) <= arguments.long_streams:
        parser.error("--budgets: each value must be above --long-streams, to leave tokens for the prompt")
    facts = provenance(parser.prog, given) | {"other_work_cores": quiet_or_warned(parser.prog)}
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as directory:
            checkpoint = write_random_checkpoint(Path(directory), arguments.shape, max_context_length=_CONTEXT)
            # Garbage collection takes 100 ms in a process with torch loaded, and would count as latency of the
            # service.
            gc.collect()
            gc.freeze()
            result = measure_all(arguments, serve, checkpoint)
    except ServiceFailed as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    result = facts | {"took_seconds": round(time.perf_counter() - began, 1)} | result
    tell(result, arguments.out)
    if arguments.plot is not None:
        draw(arguments.plot, result)
        print(arguments.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
