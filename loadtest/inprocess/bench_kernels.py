"""Benchmark of decode attention: the native kernel against PyTorch's in one run, and against memory bandwidth.

    python -m loadtest.inprocess.bench_kernels --shape S --batch 1 4 16 64 --context 128 512 1024 [--ragged] [--prefill]

One layer's call is timed as the model makes it. It runs over the layers of a KV-cache far larger than the
processor's caches, so that keys and values come from memory, as between two steps of a model. Native, sdpa and a
plain read of memory take turns. Every figure is a median. `--out` writes JSON.
"""

import argparse
import ctypes
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loadtest.measurement.benchmark_program import (
    MeasurementFailed,
    benchmark_parser,
    read_arguments,
    run_benchmark,
    show,
)
from loadtest.measurement.model_shapes import SHAPE_SIZES, shape_config
from loadtest.measurement.spread import ratio_spread, spread
from loadtest.measurement.tables import Column, table
from model.attention.backends import AttentionBackend
from model.attention.kv_cache import KVCache
from model.attention.layer_spec import AttentionForm
from model.attention.metadata import AttentionMetadata
from model.attention.native import NativeAttention
from model.attention.sdpa import SdpaAttention
from model.kernels.build import CACHE, BuildError
from model.kernels.kernel_library import KernelLibrary, load_kernels

_BLOCK_SIZE = 16
_COLD_BYTES = 160 * 2**20  # bytes of keys and values: several times a processor's largest cache
_READ_BYTES = 256 * 2**20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SHORTEST = 32  # shortest ragged context, in tokens
COLUMNS = (
    Column("case", "case"),
    Column("µs per layer", "native_us", ".0f"),
    Column("GB/s", "gb_per_second.median", ".1f"),
    Column("memory, GB/s", "memory_gb_per_second.median", ".1f"),
    Column("share of memory GB/s", "share_of_memory", ".2f"),
    Column("PyTorch, µs", "sdpa_us.median", ".0f"),
    Column("speedup over PyTorch", "times_sdpa", ".1f"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table. queries: new tokens per sequence, 1 for a decode step. Lengths in tokens."""

    shape: str
    dtype: str
    queries: int
    contexts: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the case in tables."""
        kind = "prefill" if self.queries > 1 else "ragged" if len(set(self.contexts)) > 1 else "full"
        return f"{self.shape} {self.dtype} B{len(self.contexts)} T{max(self.contexts)} {kind}"


class Layers:
    """KV-cache of a case with scattered blocks, and the inputs of a step."""

    def __init__(self, case: Case) -> None:
        config, dtype = shape_config(case.shape), _DTYPES[case.dtype]
        token_bytes = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
        self.layer_bytes = sum(case.contexts) * token_bytes
        self.num_layers = max(4, _COLD_BYTES // self.layer_bytes)
        sizes = SHAPE_SIZES[case.shape] | {"num_layers": self.num_layers}
        config = type(config).from_dict({**config.to_dict(), **sizes})
        width = -(-max(case.contexts) // _BLOCK_SIZE)
        count = len(case.contexts) * width
        tables_BN = torch.randperm(count, generator=torch.Generator().manual_seed(0)).view(-1, width)
        self.cache = KVCache(config, num_blocks=tables_BN.numel(), block_size=_BLOCK_SIZE, dtype=dtype, device="cpu")
        for pool in (self.cache.keys_LNPKD, self.cache.values_LNPKD):
            pool.copy_(torch.randn(pool.shape[1:]).to(dtype))
        positions_BT = torch.stack([torch.arange(length - case.queries, length) for length in case.contexts])
        slots_BT = tables_BN.gather(1, positions_BT // _BLOCK_SIZE) * _BLOCK_SIZE + positions_BT % _BLOCK_SIZE
        self.fields: dict[str, Any] = {
            "query_lengths": (case.queries,) * len(case.contexts),
            "context_lengths": case.contexts,
            "positions_T": positions_BT.flatten(),
            "slot_mapping_T": slots_BT.flatten(),
            "block_tables_BN": tables_BN,
        }
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.inputs = [torch.randn(slots_BT.numel(), count, config.head_dim).to(dtype) for count in heads]
        self.scale = config.head_dim**-0.5

    @torch.inference_mode()
    def seconds_a_layer(self, backend: AttentionBackend) -> float:
        """Return the seconds per layer of one pass over the layers."""
        metadata = AttentionMetadata(**self.fields)
        q, k, v = self.inputs
        began = time.perf_counter()
        for layer in range(self.num_layers):
            form = AttentionForm(layer=layer, scale=self.scale, window=None, bias=None)
            backend.attend(q, k, v, form=form, metadata=metadata, kv_cache=self.cache)
        return (time.perf_counter() - began) / self.num_layers


def memory_probe(library: KernelLibrary, threads: int) -> Callable[[], float]:
    """Return a function that reads a large array once and returns bytes per second."""
    words = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    read = library.function("kvasir_read", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, result=ctypes.c_uint64)

    def probe() -> float:
        began = time.perf_counter()
        read(words.data_ptr(), words.numel(), threads)
        return words.nbytes / (time.perf_counter() - began)

    return probe


def measure(case: Case, library: KernelLibrary, *, repeats: int, probe: Callable[[], float]) -> dict[str, Any]:
    """Measure both backends and the memory read, in turn."""
    layers = Layers(case)
    native_backend, sdpa_backend = NativeAttention(library), SdpaAttention()
    layers.seconds_a_layer(native_backend), layers.seconds_a_layer(sdpa_backend)
    native, sdpa, bandwidth = [], [], []
    for _ in range(repeats):
        bandwidth.append(probe())
        native.append(layers.seconds_a_layer(native_backend))
        sdpa.append(layers.seconds_a_layer(sdpa_backend))
    rates = [layers.layer_bytes / seconds for seconds in native]
    return {
        "case": case.name,
        "batch": len(case.contexts),
        "context": max(case.contexts),
        "native_us": spread(1e6 * seconds for seconds in native),
        "sdpa_us": spread(1e6 * seconds for seconds in sdpa),
        "gb_per_second": spread(rate / 1e9 for rate in rates),
        "memory_gb_per_second": spread(rate / 1e9 for rate in bandwidth),
        "share_of_memory": ratio_spread(rates, bandwidth),
        "times_sdpa": ratio_spread(sdpa, native),
    }


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the requested cases. Ragged contexts are uniformly random; one of them is the longest."""
    made = []
    for shape, dtype, batch, context in itertools.product(
        arguments.shape, arguments.dtype, arguments.batch, arguments.context
    ):
        generator = random.Random(0)
        shortest = _SHORTEST if arguments.ragged and not arguments.prefill else context
        contexts = (context, *(generator.randint(shortest, context) for _ in range(batch - 1)))
        made.append(Case(shape=shape, dtype=dtype, queries=context if arguments.prefill else 1, contexts=contexts))
    return made


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(arguments.threads)
    try:
        library = load_kernels(CACHE)
    except BuildError as error:
        raise MeasurementFailed(str(error)) from error
    probe = memory_probe(library, arguments.threads)
    probe()
    rows = []
    for case in cases(arguments):
        show(case.name)
        rows.append(measure(case, library, repeats=arguments.repeats, probe=probe))
    print(table(COLUMNS, rows))
    return {"kind": "kernels", "level": library.level, "threads": arguments.threads, "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 0; 1 if the kernels cannot be loaded."""
    parser = benchmark_parser("loadtest.inprocess.bench_kernels", "Measure the native decode attention kernel.")
    add = parser.add_argument
    add("--shape", nargs="+", choices=SHAPE_SIZES, default=["S", "M"])
    add("--dtype", nargs="+", choices=_DTYPES, default=["bfloat16"])
    add("--batch", nargs="+", type=int, default=[1, 4, 16, 64])
    add("--context", nargs="+", type=int, default=[128, 512, 1024])
    add("--ragged", action="store_true", help="random context lengths up to --context")
    add("--prefill", action="store_true", help="measure whole prompts instead of decode steps")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--repeats", type=int, default=5)
    arguments = read_arguments(parser, argv)
    return run_benchmark(parser, arguments, lambda: _run(arguments), prints_json=False)


if __name__ == "__main__":
    sys.exit(main())
