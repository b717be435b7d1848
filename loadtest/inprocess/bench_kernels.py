"""Benchmark of the native decode attention kernel, compared with PyTorch's and with the memory bandwidth.

    python -m loadtest.inprocess.bench_kernels --shape S --batch 1 4 16 64 --context 128 512 1024

Each pass runs over the layers of a KV-cache far larger than the processor's caches, so that keys and values come from
memory, as between two steps of a model. Both kernels and a plain read of memory take turns.
"""

import argparse
import ctypes
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from loadtest.measurement.benchmark_program import MeasurementFailed, run_program, show
from loadtest.measurement.figures import Column, ratio_spread, spread, table
from loadtest.measurement.model_shapes import SHAPE_SIZES, shape_config
from model.attention.backends import AttentionBackend
from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm, AttentionMetadata
from model.attention.native import NativeAttention
from model.attention.sdpa import SdpaAttention
from model.config import ModelConfig
from model.kernels.build import CACHE, BuildError
from model.kernels.kernel_library import KernelLibrary, load_kernels

_BLOCK_SIZE = 16
# Bytes of keys and values, and of the array that the memory probe reads: several times a processor's largest cache.
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
    """One measured size: a KV-cache with scattered blocks and many layers, and the inputs of one decode step."""

    def __init__(self, shape: str, dtype_name: str, batch: int, context: int) -> None:
        self.name = f"{shape} {dtype_name} B{batch} T{context}"
        self.batch, self.context = batch, context
        config, dtype = shape_config(shape), _DTYPES[dtype_name]
        self.layer_bytes = batch * context * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
        self.num_layers = max(4, _COLD_BYTES // self.layer_bytes)
        config = ModelConfig.from_dict(config.to_dict() | {"num_layers": self.num_layers})
        blocks = torch.randperm(batch * -(-context // _BLOCK_SIZE), generator=torch.Generator().manual_seed(0))
        self._tables_BN = blocks.view(batch, -1)
        self._cache = KVCache(config, num_blocks=len(blocks), block_size=_BLOCK_SIZE, dtype=dtype, device="cpu")
        for pool in (*self._cache.keys, *self._cache.values):
            pool.normal_()
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._qkv = [torch.randn(batch, count, config.head_dim).to(dtype) for count in heads]
        self._scale = config.head_dim**-0.5

    @torch.inference_mode()
    def run(self, backend: AttentionBackend) -> None:
        """Compute the attention of one decode step in every layer with this backend."""
        last = self.context - 1
        metadata = AttentionMetadata(
            query_lengths=(1,) * self.batch,
            context_lengths=(self.context,) * self.batch,
            positions_T=torch.full((self.batch,), last),
            slot_mapping_T=self._tables_BN[:, last // _BLOCK_SIZE] * _BLOCK_SIZE + last % _BLOCK_SIZE,
            block_tables_BN=self._tables_BN,
        )
        for layer in range(self.num_layers):
            form = AttentionForm(layer=layer, scale=self._scale, window=None, bias=None)
            backend.attend(*self._qkv, form=form, metadata=metadata, kv_cache=self._cache)


def memory_probe(library: KernelLibrary, threads: int) -> Callable[[], float]:
    """Return a function that measures memory bandwidth in bytes per second, by one read of a large array in C++."""
    words = torch.ones(_READ_BYTES // 8, dtype=torch.int64)
    read = library.function("kvasir_read", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, result=ctypes.c_uint64)
    return lambda: words.nbytes / _seconds(lambda: read(words.data_ptr(), words.numel(), threads))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(case: DecodeCase, library: KernelLibrary, repeats: int, probe: Callable[[], float]) -> dict[str, Any]:
    """Time decode attention per layer on the native and the PyTorch backend, in turn with a read of memory."""
    backends: dict[str, AttentionBackend] = {"native": NativeAttention(library), "sdpa": SdpaAttention()}
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    bandwidth = []
    for number in range(repeats + 1):
        bandwidth += [probe()] if number else []
        for name, backend in backends.items():
            taken = _seconds(partial(case.run, backend)) / case.num_layers
            seconds[name] += [taken] if number else []  # the first pass is a warm-up
    rates = [case.layer_bytes / each for each in seconds["native"]]
    return {
        "case": case.name,
        "batch": case.batch,
        "context": case.context,
        **{f"{name}_us": spread(1e6 * each for each in values) for name, values in seconds.items()},
        "gb_per_second": spread(rate / 1e9 for rate in rates),
        "memory_gb_per_second": spread(rate / 1e9 for rate in bandwidth),
        "share_of_memory": ratio_spread(rates, bandwidth),
        "times_sdpa": ratio_spread(seconds["sdpa"], seconds["native"]),
    }


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(arguments.threads)
    try:
        library = load_kernels(CACHE)
    except BuildError as error:
        raise MeasurementFailed(str(error)) from error
    probe, rows = memory_probe(library, arguments.threads), []
    for sizes in itertools.product(arguments.shape, arguments.dtype, arguments.batch, arguments.context):
        case = DecodeCase(*sizes)
        show(case.name)
        rows.append(measure(case, library, arguments.repeats, probe))
    print(table(COLUMNS, rows))
    return {"kind": "kernels", "level": library.level, "threads": arguments.threads, "rows": rows}


_OPTIONS = {
    "shape": (["S", "M"], "model shapes", SHAPE_SIZES),
    "dtype": (["bfloat16"], "dtypes of the KV-cache", _DTYPES),
    "batch": ([1, 4, 16, 64], "batch sizes, in sequences"),
    "context": ([128, 512, 1024], "context lengths, in tokens"),
    "threads": (torch.get_num_threads(), "CPU threads"),
    "repeats": (5, "repeats of each measurement"),
}
main = partial(run_program, "loadtest.inprocess.bench_kernels", __doc__, _OPTIONS, _run, prints_json=False)


if __name__ == "__main__":
    raise SystemExit(main())
