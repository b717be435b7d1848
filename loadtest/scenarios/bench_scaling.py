"""Benchmark of the service's scaling, with fitted exponents.

    python -m loadtest.scenarios.bench_scaling --checkpoint checkpoints/NAME --out docs/results/scaling.json

It measures the time of a decode step over batch size and over context length, resident memory of the KV-cache over
tokens, TTFT over the length of a cached prefix, and start time of `kvasir serve` over the size of its checkpoint.

Arguments after `--` are settings of the engine and of the services that are started.
"""

import itertools
import math
import multiprocessing
import os
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from loadtest.inprocess.closed_loop import EngineRun, greedy, run_closed
from loadtest.inprocess.engine import InProcess
from loadtest.measurement.benchmark_program import benchmark_parser, read_arguments, run_benchmark, show
from loadtest.measurement.model_shapes import shape_config, shape_tokenizer
from loadtest.measurement.spread import ratio_spread, spread
from loadtest.scenarios.bench_service import measure_start
from model.attention.kv_cache import KVCache
from model.checkpoint.loading import save_checkpoint
from model.config import ModelConfig
from service.config.settings import ServeSettings, read_settings

_BATCHES, _CONTEXTS = (1, 2, 4, 8, 16, 32, 64), (64, 128, 256, 512, 960)
_STEPS = 16  # steps per timed run of a batch
_PROMPT, _SHARED = 768, (0, 128, 256, 384, 512, 640, 704)
_KV_TOKENS, _BLOCK, _TOKENS_PER_WRITE = (32_768, 65_536, 131_072, 262_144), 16, 4096
_READ_BYTES = 2**24
_WIDTH = 1024  # of the layers of temporary checkpoints


def fits(xs: Sequence[float], ys: Sequence[float]) -> dict[str, Any]:
    """Return two least-squares fits: y = factor x^exponent in logarithms, and y = fixed + each x in relative errors.

    `last` is the exponent between the two largest x. At least two different x are needed, and positive values.
    """
    x, y = np.array(sorted(zip(xs, ys, strict=True)), dtype=np.float64).T
    exponent, constant = np.polyfit(np.log(x), np.log(y), 1)
    each, fixed = np.polyfit(x, y, 1, w=1 / y)
    last = math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])
    return {
        "power": {"exponent": float(exponent), "factor": math.exp(constant), "last": last},
        "line": {"fixed": float(fixed), "each": float(each)},
    }


def measure_engine(contestant: InProcess, repeats: int) -> dict[str, Any]:
    """Measure decode steps and cached prefixes. Each repeat goes round all sizes, so that drift affects all alike."""
    settings, rng = contestant.settings, random.Random(0)
    uids = (f"scaling-{number}" for number in itertools.count())

    def fresh(num_tokens: int) -> list[int]:
        """Return random token ids, which are not in the prefix cache."""
        return [rng.randrange(contestant.manifest.config.vocab_size) for _ in range(num_tokens)]

    def run(prompts: Sequence[list[int]], output: int) -> EngineRun:
        submits = [greedy(next(uids), prompt, output) for prompt in prompts]
        return run_closed(contestant.engine, submits, num_streams=len(submits))

    # All of a prompt but one block comes from the prefix cache. Until the last sequence has its first token, several
    # steps may pass.
    output = _STEPS + 1 + max(_BATCHES) * (settings.block_size + 1) // settings.max_batched_tokens
    texts = [fresh(max(_CONTEXTS)) for _ in range(max(_BATCHES))]

    def step_seconds(batch: int, context: int) -> float:
        return run([text[: context - output // 2] for text in texts[:batch]], output).full_step_seconds

    curves = {
        "over_batch": [(batch, _CONTEXTS[len(_CONTEXTS) // 2]) for batch in _BATCHES],
        "over_context": [(_BATCHES[len(_BATCHES) // 2], context) for context in _CONTEXTS],
    }
    sizes = [size for curve in curves.values() for size in curve]
    show("warm-up")
    for size in sorted(sizes, reverse=True):
        step_seconds(*size)
    steps: dict[tuple[int, int], list[float]] = {size: [] for size in sizes}
    shared: dict[int, list[tuple[float, float, int]]] = {count: [] for count in _SHARED}
    for number in range(repeats):
        show(f"steps and prefixes, repeat {number + 1} of {repeats}")
        for size in sizes:
            steps[size].append(1e3 * step_seconds(*size))
        first = fresh(_PROMPT)
        run([first], 1)
        for count, values in shared.items():
            rest = _PROMPT - count
            cached, alone = (run([prompt], 1) for prompt in (first[:count] + fresh(rest), fresh(rest)))
            values.append((1e3 * cached.ttft_seconds[0], 1e3 * alone.ttft_seconds[0], cached.num_cached_tokens[0]))
    return {
        "steps": {name: _steps(name, curve, steps) for name, curve in curves.items()},
        "prefixes": _prefixes(shared),
    }


def _steps(name: str, sizes: Sequence[tuple[int, int]], steps: dict[tuple[int, int], list[float]]) -> dict[str, Any]:
    xs = [batch if name == "over_batch" else context for batch, context in sizes]
    points: list[dict[str, Any]] = [
        {"batch_size": size[0], "context_length": size[1], "step_ms": spread(steps[size])} for size in sizes
    ]
    return {"points": points, "fits": fits(xs, [point["step_ms"]["median"] for point in points])}


def _prefixes(shared: dict[int, list[tuple[float, float, int]]]) -> dict[str, Any]:
    """Return TTFT of prompts with a cached prefix, beside that of uncached prompts as long as the rest."""
    points = []
    for count, values in shared.items():
        cached, alone, hits = zip(*values, strict=True)
        points.append(
            {
                "shared_tokens": count,
                "rest_tokens": _PROMPT - count,
                "hits": hits[-1],
                "ttft_ms": spread(cached),
                "rest_alone_ms": spread(alone),
                "ratio": ratio_spread(cached, alone),
            }
        )
    ttfts = [point["ttft_ms"]["median"] for point in points]
    return {"prompt_tokens": _PROMPT, "points": points, "fits": fits([p["rest_tokens"] for p in points], ttfts)}


def kv_memory(config: ModelConfig, dtype_name: str, tokens: Sequence[int]) -> dict[str, Any]:
    """Return the memory that becomes resident as tokens are written to a KV-cache, with the formula's value.

    Measured in a separate process, so that no other allocation changes its resident memory.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
        points = process.submit(_resident_bytes, config, dtype_name, sorted(tokens)).result()
    return {
        "bytes_per_token": points[0]["formula"] // points[0]["tokens"],
        "points": points,
        "fits": fits([point["tokens"] for point in points], [point["bytes"] for point in points]),
    }


def _resident_bytes(config: ModelConfig, dtype_name: str, tokens: Sequence[int]) -> list[dict[str, Any]]:
    dtype: torch.dtype = getattr(torch, dtype_name)
    cache, small = (
        KVCache(config, num_blocks=count, block_size=_BLOCK, dtype=dtype, device="cpu")
        for count in (-(-tokens[-1] // _BLOCK), 1)
    )
    keys, values = (
        torch.ones(_TOKENS_PER_WRITE, config.num_kv_heads, size, dtype=dtype)
        for size in (config.key_dim, config.head_dim)
    )
    small.write(0, torch.arange(_BLOCK), keys[:_BLOCK], values[:_BLOCK])  # allocations of a first write do not count
    process, written, points = psutil.Process(), 0, []
    before = process.memory_info().rss
    for wanted in tokens:
        while written < wanted:
            slots = torch.arange(written, min(wanted, written + _TOKENS_PER_WRITE))
            for layer in range(config.num_layers):
                cache.write(layer, slots, keys[: len(slots)], values[: len(slots)])
            written += len(slots)
        resident, formula = process.memory_info().rss - before, wanted * config.kv_bytes_per_token(dtype.itemsize)
        points.append({"tokens": wanted, "bytes": resident, "formula": formula, "ratio": resident / formula})
    return points


def write_checkpoint(directory: Path, num_bytes: int) -> None:
    """Write about `num_bytes` of random float32 weights: shape S widened, with as many layers as fit, at least one."""
    thin = replace(shape_config("S"), num_layers=1, hidden_size=_WIDTH, num_heads=16, num_kv_heads=8, mlp_size=2816)
    layer = 4 * (replace(thin, num_layers=2).num_parameters - thin.num_parameters)
    config = replace(thin, num_layers=max(1, 1 + round((num_bytes - 4 * thin.num_parameters) / layer)))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.empty(shape).uniform_(-0.05, 0.05, generator=generator)
        for name, shape in config.parameter_shapes().items()
    }
    tokenizer, training = shape_tokenizer(config.vocab_size), {"steps": 0}
    save_checkpoint(directory, config=config, tensors=tensors, tokenizer=tokenizer, name="random", training=training)


def read_seconds(paths: Sequence[Path]) -> float:
    """Return the seconds to read the files once, one after the other, into one buffer."""
    buffer, began = bytearray(_READ_BYTES), time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def forget(paths: Sequence[Path]) -> None:
    """Drop the files from the kernel's page cache. The host of a virtual machine may still keep them."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_starts(directory: Path, repeats: int, serve: Sequence[str]) -> dict[str, Any]:
    """Start the service and read its weights in turn, with the files in the page cache (warm) and not (cold)."""
    paths = sorted(directory.glob("*.safetensors"))
    seconds: dict[str, dict[str, list[float]]] = {kind: {"start": [], "read": []} for kind in ("warm", "cold")}
    for _ in range(repeats):
        forget(paths)
        seconds["cold"]["read"].append(read_seconds(paths))
        seconds["warm"]["read"].append(read_seconds(paths))
        seconds["warm"]["start"].append(measure_start(directory, serve))
        forget(paths)
        seconds["cold"]["start"].append(measure_start(directory, serve))
    figures = {
        kind: {
            "start_seconds": spread(values["start"]),
            "read_seconds": spread(values["read"]),
            "ratio": ratio_spread(values["start"], values["read"]),
        }
        for kind, values in seconds.items()
    }
    return {"bytes": sum(path.stat().st_size for path in paths), **figures}


def start_fits(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fits of start and read over GB of weights, warm and cold."""
    sizes = [point["bytes"] / 1e9 for point in points]
    return {
        kind: {
            what: fits(sizes, [point[kind][f"{what}_seconds"]["median"] for point in points])
            for what in ("start", "read")
        }
        for kind in ("warm", "cold")
    }


def measure(arguments: Namespace) -> dict[str, Any]:
    """Run all measurements. Start-up times come last, because nothing else may run meanwhile."""
    flags = ["--checkpoint", str(arguments.checkpoint), *arguments.serve]
    contestant = InProcess.open(read_settings(ServeSettings, flags, command="serve", summary=""))
    figures = measure_engine(contestant, arguments.repeats)
    show("KV-cache memory")
    memory = kv_memory(contestant.manifest.config, contestant.built.kv_cache_dtype, _KV_TOKENS)
    starts = []
    for megabytes in arguments.sizes:
        show(f"starts with {megabytes} MB of weights")
        with tempfile.TemporaryDirectory(prefix="kvasir-scaling-", dir=arguments.scratch) as scratch:
            write_checkpoint(Path(scratch) / "model", 10**6 * megabytes)
            starts.append(measure_starts(Path(scratch) / "model", arguments.start_repeats, arguments.serve))
    return {
        "kind": "scaling",
        "model": contestant.facts,
        "settings": {"repeats": arguments.repeats, "start_repeats": arguments.start_repeats},
        **figures,
        "kv_memory": memory,
        "starts": {"points": starts, **start_fits(starts)},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return the exit code: 0; 1 if a service failed; 2 for invalid arguments."""
    parser = benchmark_parser("loadtest.scenarios.bench_scaling", "Measure the service's scaling and fit exponents.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint of the engine's measurements")
    add("--repeats", type=int, default=5, metavar="N", help="repeats of the engine's measurements (default: 5)")
    add("--start-repeats", type=int, default=3, metavar="N", help="starts per checkpoint size (default: 3)")
    text = "sizes of the temporary checkpoints, at least 50 MB apart (default: 100 300 1000)"
    add("--sizes", type=int, nargs="+", default=(100, 300, 1000), metavar="MB", help=text)
    add("--scratch", type=Path, metavar="DIR", help="directory for the temporary checkpoints (default: TMPDIR)")
    arguments = read_arguments(parser, argv)
    gaps = (later - earlier for earlier, later in itertools.pairwise(sorted(arguments.sizes)))
    if len(arguments.sizes) < 2 or min(gaps) < 50 or min(arguments.repeats, arguments.start_repeats) < 1:
        parser.error("repeats must be at least 1, and --sizes needs two values at least 50 MB apart, from 100 MB")
    return run_benchmark(parser, arguments, lambda: measure(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
