"""Benchmark of the service's scaling, with fitted exponents.

    python -m loadtest.scenarios.bench_scaling --checkpoint checkpoints/NAME --out docs/results/scaling.json

It measures:

- step time of a decode step over batch size and over context length;
- resident memory of the KV-cache over tokens;
- TTFT over the length of a cached prefix, compared with a prompt as long as the rest;
- start time of `kvasir serve` over the size of its checkpoint, compared with the time to read its files.

Arguments after `--` are settings of the engine and of the services that are started.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from loadtest.inprocess.engine import InProcess
from loadtest.measurement.benchmark_program import benchmark_parser, read_arguments, run_benchmark, show
from loadtest.measurement.model_shapes import shape_config, shape_tokenizer
from loadtest.measurement.spread import ratio_spread, spread
from loadtest.scenarios.bench_service import measure_start
from loadtest.scenarios.scaling_engine import Prefixes, Steps, fits, kv_memory
from model.checkpoint.loading import save_checkpoint
from model.config import ModelConfig
from service.config.settings import ServeSettings, read_settings

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (64, 128, 256, 512, 960)
_KV_TOKENS = (32_768, 65_536, 131_072, 262_144)
_PROMPT = 768
_SHARED = (0, 128, 256, 384, 512, 640, 704)
_READ_BYTES = 2**24
_WIDTH = 1024


def config_of(num_bytes: int) -> ModelConfig:
    """Return a wider model of shape S's kind with as many layers as fit into `num_bytes` of float32, at least one."""
    thin = replace(shape_config("S"), num_layers=1, hidden_size=_WIDTH, num_heads=16, num_kv_heads=8, mlp_size=2816)
    thick = replace(thin, num_layers=2)
    layer = 4 * (thick.num_parameters - thin.num_parameters)
    return replace(thin, num_layers=max(1, 1 + round((num_bytes - 4 * thin.num_parameters) / layer)))


def write_checkpoint(directory: Path, config: ModelConfig) -> None:
    """Write random float32 weights in Kvasir's format. Its manifest has each file's SHA-256, which a start verifies."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.empty(shape).uniform_(-0.05, 0.05, generator=generator)
        for name, shape in config.parameter_shapes().items()
    }
    save_checkpoint(
        directory,
        config=config,
        tensors=tensors,
        tokenizer=shape_tokenizer(config.vocab_size),
        name=f"random-{config.num_layers}",
        training={"steps": 0},
    )


def read_seconds(paths: Sequence[Path]) -> float:
    """Return the seconds to read the files once, one after the other, into one buffer."""
    buffer = memoryview(bytearray(_READ_BYTES))
    began = time.perf_counter()
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
    starts: dict[str, list[float]] = {"warm": [], "cold": []}
    reads: dict[str, list[float]] = {"warm": [], "cold": []}
    for _ in range(repeats):
        forget(paths)
        reads["cold"].append(read_seconds(paths))
        reads["warm"].append(read_seconds(paths))
        starts["warm"].append(measure_start(directory, serve))
        forget(paths)
        starts["cold"].append(measure_start(directory, serve))
    figures = {
        kind: {
            "start_seconds": spread(starts[kind]),
            "read_seconds": spread(reads[kind]),
            "ratio": ratio_spread(starts[kind], reads[kind]),
        }
        for kind in starts
    }
    return {"bytes": sum(path.stat().st_size for path in paths), **figures}


def growth(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return fits of start and read over GB, warm and cold.

    `marginal` is the time of a start per GB relative to that of a read.
    """
    sizes = [point["bytes"] / 1e9 for point in points]
    figures: dict[str, Any] = {}
    for kind in ("warm", "cold"):
        start, read = (
            fits(sizes, [point[kind][f"{what}_seconds"]["median"] for point in points]) for what in ("start", "read")
        )
        figures[kind] = {"start": start, "read": read, "marginal": start["line"]["each"] / read["line"]["each"]}
    return figures


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements. Starts come last, because they need the machine to themselves."""
    flags = ["--checkpoint", str(arguments.checkpoint), *arguments.serve]
    settings = read_settings(ServeSettings, flags, command="serve", summary="")
    configs = [config_of(10**6 * megabytes) for megabytes in arguments.sizes]
    if len({config.num_layers for config in configs}) < len(configs):
        raise ValueError("two sizes give the same number of layers; choose --sizes at least 50 MB apart, from 100 MB")
    contestant = InProcess.open(settings)
    show("warm-up")
    steps, prefixes = Steps(contestant, _BATCHES, _CONTEXTS), Prefixes(contestant, _PROMPT, _SHARED)
    for number in range(arguments.repeats):
        show(f"steps and prefixes, repeat {number + 1} of {arguments.repeats}")
        steps.round()
        prefixes.round()
    show("KV-cache memory")
    memory = kv_memory(contestant.manifest.config, contestant.built.kv_cache_dtype, _KV_TOKENS)
    starts = []
    for megabytes, config in zip(arguments.sizes, configs, strict=True):
        show(f"starts with {megabytes} MB of weights")
        with tempfile.TemporaryDirectory(prefix="kvasir-scaling-", dir=arguments.scratch) as scratch:
            write_checkpoint(Path(scratch) / "model", config)
            starts.append(measure_starts(Path(scratch) / "model", arguments.start_repeats, arguments.serve))
    return {
        "kind": "scaling",
        "model": contestant.facts,
        "settings": {"repeats": arguments.repeats, "start_repeats": arguments.start_repeats},
        "steps": steps.to_dict(),
        "kv_memory": memory,
        "prefixes": prefixes.to_dict(),
        "starts": {"points": starts, **growth(starts)},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return the exit code: 0; 1 if a service failed; 2 for invalid arguments."""
    parser = benchmark_parser("loadtest.scenarios.bench_scaling", "Measure the service's scaling and fit exponents.")
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint of the engine's measurements")
    add("--repeats", type=int, default=5, metavar="N", help="repeats of the engine's measurements (default: 5)")
    add("--start-repeats", type=int, default=3, metavar="N", help="starts per checkpoint size (default: 3)")
    text = "sizes of the temporary checkpoints (default: 100 300 1000)"
    add("--sizes", type=int, nargs="+", default=(100, 300, 1000), metavar="MB", help=text)
    add("--scratch", type=Path, metavar="DIR", help="directory for the temporary checkpoints (default: TMPDIR)")
    arguments = read_arguments(parser, argv)
    if min(arguments.repeats, arguments.start_repeats, *arguments.sizes) < 1 or len(set(arguments.sizes)) < 2:
        parser.error("repeats and sizes must be at least 1, and --sizes needs two different values")
    return run_benchmark(parser, arguments, lambda: measure(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
