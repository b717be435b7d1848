"""Benchmark of the service's scaling, with fitted exponents: decode steps, KV-cache, cached prefixes and starts."""

import itertools
import math
import multiprocessing
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from loadtest.inprocess import bench_engine
from loadtest.inprocess.engine import EngineRun, InProcess
from loadtest.measurement.benchmark_program import run_program, show
from loadtest.measurement.figures import ratio_spread, spread, value_at
from loadtest.measurement.model_shapes import write_random_checkpoint
from loadtest.scenarios.bench_service import measure_start
from loadtest.scenarios.service_benchmark import serve_settings
from model.attention.kv_cache import KVCache
from model.config import ModelConfig
from service.config.settings import ServeSettings

_BATCHES, _CONTEXTS = (1, 2, 4, 8, 16, 32, 64), (64, 128, 256, 512, 960)
_BATCH, _CONTEXT = 8, 256  # the batch size of the curve over contexts, the context of the curve over batch sizes
_STEPS = 16  # steps per timed run of a batch
_PROMPT, _SHARED = 768, (0, 128, 256, 384, 512, 640, 704)
_KV_TOKENS, _BLOCK = (32_768, 65_536, 131_072, 262_144), 16
_READ_BYTES = 2**24


def fits(xs: Sequence[float], ys: Sequence[float]) -> dict[str, Any]:
    """Return two least-squares fits: y = factor * x^exponent, and y = fixed + each * x.

    The first minimizes errors of logarithms, the second relative errors. `last` is the exponent of the power law
    through the two points with the largest x.
    """
    x, y = np.array(sorted(zip(xs, ys, strict=True)), dtype=np.float64).T
    exponent, constant = np.polyfit(np.log(x), np.log(y), 1)
    each, fixed = np.polyfit(x, y, 1, w=1 / y)
    last = math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])
    return {
        "power": {"exponent": float(exponent), "factor": math.exp(constant), "last": last},
        "line": {"fixed": float(fixed), "each": float(each)},
    }


def _curve(points: Sequence[dict[str, Any]], over: str, value: str) -> dict[str, Any]:
    """Return measured points, and the fits of their field `value` as a function of their field `over`."""
    return {"points": points, "fits": fits([point[over] for point in points], [value_at(p, value) for p in points])}


def decode_steps(settings: ServeSettings, repeats: int, batches: Sequence[int], contexts: Sequence[int]) -> Any:
    """Return decode step times as `kvasir bench` measures them, without contexts that do not fit the model."""
    sweep = Namespace(
        batch=batches, context=contexts, prompt_tokens=(), steps=_STEPS, repeats=repeats, usual=("context",), out=None
    )
    return bench_engine.measure(sweep, settings)["decode"]


def cached_prefixes(contestant: InProcess, repeats: int) -> list[dict[str, Any]]:
    """Return TTFT of prompts with a cached prefix, and of uncached prompts with as many tokens as follow the prefix."""

    def run(prompt: list[int]) -> EngineRun:
        return contestant.complete([prompt], 1)

    pairs: dict[int, list[tuple[EngineRun, EngineRun]]] = {num_shared: [] for num_shared in _SHARED}
    for _ in range(repeats):
        first = contestant.random_prompt(_PROMPT)
        run(first)
        for num_shared, runs in pairs.items():
            rest = _PROMPT - num_shared
            runs.append((run(first[:num_shared] + contestant.random_prompt(rest)), run(contestant.random_prompt(rest))))
    points = []
    for num_shared, runs in pairs.items():
        cached, alone = ([1e3 * each.ttft_seconds[0] for each in side] for side in zip(*runs, strict=True))
        points.append(
            {
                "shared_tokens": num_shared,
                "rest_tokens": _PROMPT - num_shared,
                "hits": runs[-1][0].num_cached_tokens[0],
                "ttft_ms": spread(cached),
                "rest_alone_ms": spread(alone),
                "ratio": ratio_spread(cached, alone),
            }
        )
    return points


def resident_bytes(config: ModelConfig, dtype_name: str, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Return the resident bytes of a KV-cache for each number of written tokens, and the bytes by formula."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    counts = (-(-max(tokens) // _BLOCK), 1)
    cache, small = (KVCache(config, num_blocks=n, block_size=_BLOCK, dtype=dtype, device="cpu") for n in counts)
    sizes = (config.key_dim, config.head_dim)
    keys, values = (torch.ones(_BLOCK, config.num_kv_heads, size, dtype=dtype) for size in sizes)
    small.write(0, torch.arange(_BLOCK), keys, values)  # allocations of a first write do not count
    process, written, points = psutil.Process(), 0, []
    before = process.memory_info().rss
    for wanted in sorted(tokens):
        for start, layer in itertools.product(range(written, wanted, _BLOCK), range(config.num_layers)):
            cache.write(layer, torch.arange(start, start + _BLOCK), keys, values)
        written = wanted
        resident, formula = process.memory_info().rss - before, wanted * config.kv_bytes_per_token(dtype.itemsize)
        points.append({"tokens": wanted, "bytes": resident, "formula": formula, "ratio": resident / formula})
    return points


def read_seconds(paths: Sequence[Path]) -> float:
    """Return the seconds that it takes to read the files once, one after the other, into a small buffer."""
    buffer, began = bytearray(_READ_BYTES), time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def drop_from_page_cache(paths: Sequence[Path]) -> None:
    """Drop the files from the kernel's page cache. The host of a virtual machine may still keep them."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_starts(directory: Path, repeats: int, serve: Sequence[str]) -> dict[str, Any]:
    """Measure start-up time and read time of weight files, with the files in the page cache (warm) or not (cold)."""
    paths = sorted(directory.glob("*.safetensors"))
    runs = {"read": partial(read_seconds, paths), "start": partial(measure_start, directory, serve)}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in itertools.product(("cold", "warm"), runs)}
    for _, (kind, name) in itertools.product(range(repeats), seconds):
        if kind == "cold":
            drop_from_page_cache(paths)
        seconds[kind, name].append(runs[name]())
    point: dict[str, Any] = {"bytes": sum(path.stat().st_size for path in paths)}
    for kind in ("warm", "cold"):
        figures = {f"{name}_seconds": spread(seconds[kind, name]) for name in runs}
        point[kind] = figures | {"ratio": ratio_spread(seconds[kind, "start"], seconds[kind, "read"])}
    return point


def measure(arguments: Namespace) -> dict[str, Any]:
    """Run all measurements of scaling. Start-up times come last, because nothing else may run beside them."""
    settings, repeats = serve_settings(arguments), arguments.repeats
    over_batch = decode_steps(settings, repeats, _BATCHES, (_CONTEXT,))
    over_context = decode_steps(settings, repeats, (_BATCH,), _CONTEXTS)
    show("cached prefixes")
    contestant = InProcess.open(settings)
    prefixes = cached_prefixes(contestant, repeats)
    show("KV-cache memory")
    # In a separate process no other allocation changes the resident memory.
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
        dtype_name = contestant.built.kv_cache_dtype
        memory = process.submit(resident_bytes, contestant.manifest.config, dtype_name, _KV_TOKENS).result()
    starts = []
    for shape in arguments.shapes:
        show(f"starts of shape {shape}")
        with tempfile.TemporaryDirectory(prefix="kvasir-scaling-") as scratch:
            directory = write_random_checkpoint(Path(scratch), shape)
            starts.append(measure_starts(directory, arguments.start_repeats, arguments.serve))
    sizes = [point["bytes"] / 1e9 for point in starts]
    start_fits: dict[str, dict[str, Any]] = {"warm": {}, "cold": {}}
    for kind, name in itertools.product(start_fits, ("start", "read")):
        start_fits[kind][name] = fits(sizes, [point[kind][f"{name}_seconds"]["median"] for point in starts])
    each = memory[0]["formula"] // memory[0]["tokens"]
    return {
        "kind": "scaling",
        "model": contestant.facts,
        "settings": {"repeats": repeats, "start_repeats": arguments.start_repeats},
        "steps": {
            "over_batch": _curve(over_batch, "batch_size", "step_ms.median"),
            "over_context": _curve(over_context, "context_length", "step_ms.median"),
        },
        "prefixes": {"prompt_tokens": _PROMPT} | _curve(prefixes, "rest_tokens", "ttft_ms.median"),
        "kv_memory": {"bytes_per_token": each} | _curve(memory, "tokens", "bytes"),
        "starts": {"points": starts} | start_fits,
    }


_OPTIONS = {
    "checkpoint": (Path, "checkpoint for all measurements except starts"),
    "repeats": (5, "repeats of all measurements except starts"),
    "start-repeats": (3, "starts per shape, each with the files in the page cache and without"),
    "shapes": (["S", "M", "qwen3-0.6b"], "shapes of the started checkpoints, written to TMPDIR; at least two"),
}
main = partial(run_program, "loadtest.scenarios.bench_scaling", __doc__, _OPTIONS, measure)


if __name__ == "__main__":
    raise SystemExit(main())
