"""Time of `kvasir serve` from process start to first token, over the size of its checkpoint and the time to read it.

Imports torch.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from loadtest.measurement.model_shapes import shape_config, shape_tokenizer
from loadtest.measurement.spread import Spread
from loadtest.scenarios.bench_service import measure_start
from loadtest.scenarios.scaling_fits import fits
from model.checkpoint.loading import save_checkpoint
from model.config import ModelConfig

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


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold the tensors."""
    return sorted(directory.glob("*.safetensors"))


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
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@dataclass(slots=True)
class StartPoint:
    """A checkpoint of one size: starts and reads in turn, with its files in the page cache (warm) and not (cold)."""

    num_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"warm": [], "cold": []})
    reads: dict[str, list[float]] = field(default_factory=lambda: {"warm": [], "cold": []})

    def measure(self, directory: Path, serve: Sequence[str]) -> None:
        """Add a repeat."""
        paths = weight_files(directory)
        forget(paths)
        self.reads["cold"].append(read_seconds(paths))
        self.reads["warm"].append(read_seconds(paths))
        self.seconds["warm"].append(measure_start(directory, serve))
        forget(paths)
        self.seconds["cold"].append(measure_start(directory, serve))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary. `ratio`: start time relative to read time."""
        return {
            "bytes": self.num_bytes,
            **{
                kind: {
                    "start_seconds": Spread(tuple(self.seconds[kind])).to_dict(),
                    "read_seconds": Spread(tuple(self.reads[kind])).to_dict(),
                    "ratio": Spread.of_ratios(self.seconds[kind], self.reads[kind]).to_dict(),
                }
                for kind in ("warm", "cold")
            },
        }


class Starts:
    """Checkpoints of several sizes, one at a time in `scratch` (None: the directory of temporary files).

    Raises:
        ValueError: two sizes give the same number of layers.
    """

    def __init__(self, scratch: Path | None, sizes: Sequence[int], *, repeats: int, serve: Sequence[str]) -> None:
        self._scratch, self._repeats, self._serve = scratch, repeats, serve
        self._configs = [config_of(size) for size in sizes]
        self._points: list[StartPoint] = []
        if len({config.num_layers for config in self._configs}) < len(sizes):
            raise ValueError(
                "two of these sizes give the same number of layers; choose sizes at least 50 MB apart, from 100 MB"
            )

    def run(self) -> Iterator[str]:
        """Measure all sizes. Yields a label before each repeat."""
        for config in self._configs:
            with tempfile.TemporaryDirectory(prefix="kvasir-scaling-", dir=self._scratch) as scratch:
                directory = Path(scratch) / "model"
                write_checkpoint(directory, config)
                point = StartPoint(sum(path.stat().st_size for path in weight_files(directory)))
                self._points.append(point)
                for _ in range(self._repeats):
                    yield f"start of {point.num_bytes / 1e6:.0f} MB"
                    point.measure(directory, self._serve)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready points, and fits of start and read over size."""
        figures = [point.to_dict() for point in self._points]
        return {"points": figures, **growth(figures)}


def growth(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return fits of start and read over GB, warm and cold.

    `marginal` is the time of a start per GB relative to that of a read.
    """
    sizes = [point["bytes"] / 1e9 for point in points]
    figures: dict[str, Any] = {}
    for kind in ("warm", "cold"):
        starts = fits(sizes, [point[kind]["start_seconds"]["median"] for point in points])
        reads = fits(sizes, [point[kind]["read_seconds"]["median"] for point in points])
        marginal = starts["line"]["each"] / reads["line"]["each"]
        figures[kind] = {"start": starts, "read": reads, "marginal": marginal}
    return figures
