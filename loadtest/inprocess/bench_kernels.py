"""Benchmark of decode attention: the native kernel against PyTorch's in one run, and against memory bandwidth.

    python -m loadtest.inprocess.bench_kernels --shape S --batch 1 4 16 64 --context 128 512 1024

Each call runs over the layers of a KV-cache far larger than the processor's caches, so that keys and values come from
memory, as between two steps of a model. Both kernels and a plain read of memory take turns.
"""

import argparse
import ctypes
import itertools
import sys
import time
from collections.abc import Sequence
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
from model.config import ModelConfig
from model.kernels.build import CACHE, BuildError
from model.kernels.kernel_library import KernelLibrary, load_kernels

_BLOCK_SIZE = 16
# Keys and values, and the array read by the memory probe: each several times the processor's largest cache.
_COLD_BYTES, _READ_BYTES = 160 * 2**20, 256 * 2**20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COLUMNS = (
    Column("case", "case"),
    Column("µs per layer", "native_us", ".0f"),
    Column("GB/s", "gb_per_second.median", ".1f"),
    Column("memory, GB/s", "memory_gb_per_second.median", ".1f"),
    Column("share of memory GB/s", "share_of_memory", ".2f"),
    Column("PyTorch, µs", "sdpa_us.median", ".0f"),
    Column("speedup over PyTorch", "times_sdpa", ".1f"),
)


class DecodeCase:
    """KV-cache with scattered blocks and many layers, and the inputs of one decode step: a row of the table."""

    def __init__(self, shape: str, dtype_name: str, batch: int, context: int) -> None:
        self.name = f"{shape} {dtype_name} B{batch} T{context}"
        self.batch, self.context = batch, context
        config, dtype = shape_config(shape), _DTYPES[dtype_name]
        self.layer_bytes = batch * context * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
        self.num_layers = max(4, _COLD_BYTES // self.layer_bytes)
        config = ModelConfig.from_dict(config.to_dict() | {"num_layers": self.num_layers})
        num_blocks = -(-context // _BLOCK_SIZE)
        tables_BN = torch.randperm(batch * num_blocks, generator=torch.Generator().manual_seed(0)).view(batch, -1)
        self.cache = KVCache(config, num_blocks=tables_BN.numel(), block_size=_BLOCK_SIZE, dtype=dtype, device="cpu")
        for pool in (self.cache.keys_LNPKD, self.cache.values_LNPKD):
            pool.copy_(torch.randn(pool.shape[1:]).to(dtype))
        last = context - 1
        self.fields: dict[str, Any] = {
            "query_lengths": (1,) * batch,
            "context_lengths": (context,) * batch,
            "positions_T": torch.full((batch,), last),
            "slot_mapping_T": tables_BN[:, last // _BLOCK_SIZE] * _BLOCK_SIZE + last % _BLOCK_SIZE,
            "block_tables_BN": tables_BN,
        }
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.inputs = [torch.randn(batch, count, config.head_dim).to(dtype) for count in heads]
        self.scale = config.head_dim**-0.5

    @torch.inference_mode()
    def layer_seconds(self, backend: AttentionBackend) -> float:
        """Return the mean seconds per layer of one pass over the layers."""
        metadata = AttentionMetadata(**self.fields)
        q, k, v = self.inputs
        began = time.perf_counter()
        for layer in range(self.num_layers):
            form = AttentionForm(layer=layer, scale=self.scale, window=None, bias=None)
            backend.attend(q, k, v, form=form, metadata=metadata, kv_cache=self.cache)
        return (time.perf_counter() - began) / self.num_layers


class MemoryProbe:
    """Probe that reads a large array once by the native kernels' threads."""

    def __init__(self, library: KernelLibrary, threads: int) -> None:
        self._words, self._threads = torch.ones(_READ_BYTES // 8, dtype=torch.int64), threads
        types = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self._read = library.function("kvasir_read", *types, result=ctypes.c_uint64)
        self.bytes_per_second()

    def bytes_per_second(self) -> float:
        """Read the array and return the bandwidth."""
        began = time.perf_counter()
        self._read(self._words.data_ptr(), self._words.numel(), self._threads)
        return self._words.nbytes / (time.perf_counter() - began)


def measure(case: DecodeCase, library: KernelLibrary, repeats: int, probe: MemoryProbe) -> dict[str, Any]:
    """Measure both attention backends and the memory read, in turn."""
    native_backend, sdpa_backend = NativeAttention(library), SdpaAttention()
    case.layer_seconds(native_backend), case.layer_seconds(sdpa_backend)
    native, sdpa, bandwidth = [], [], []
    for _ in range(repeats):
        bandwidth.append(probe.bytes_per_second())
        native.append(case.layer_seconds(native_backend))
        sdpa.append(case.layer_seconds(sdpa_backend))
    rates = [case.layer_bytes / seconds for seconds in native]
    return {
        "case": case.name,
        "batch": case.batch,
        "context": case.context,
        "native_us": spread(1e6 * seconds for seconds in native),
        "sdpa_us": spread(1e6 * seconds for seconds in sdpa),
        "gb_per_second": spread(rate / 1e9 for rate in rates),
        "memory_gb_per_second": spread(rate / 1e9 for rate in bandwidth),
        "share_of_memory": ratio_spread(rates, bandwidth),
        "times_sdpa": ratio_spread(sdpa, native),
    }


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(arguments.threads)
    try:
        library = load_kernels(CACHE)
    except BuildError as error:
        raise MeasurementFailed(str(error)) from error
    probe, rows = MemoryProbe(library, arguments.threads), []
    for sizes in itertools.product(arguments.shape, arguments.dtype, arguments.batch, arguments.context):
        case = DecodeCase(*sizes)
        show(case.name)
        rows.append(measure(case, library, arguments.repeats, probe))
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
    add("--threads", type=int, default=torch.get_num_threads())
    add("--repeats", type=int, default=5)
    arguments = read_arguments(parser, argv)
    return run_benchmark(parser, arguments, lambda: _run(arguments), prints_json=False)


if __name__ == "__main__":
    sys.exit(main())
