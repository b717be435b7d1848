"""Benchmark of decode attention: the kernels of a device in one run, and against memory bandwidth.

    python -m loadtest.inprocess.bench_kernels --shape S --batch 1 4 16 64 --context 128 512 1024 [--device cuda]

Each pass runs over the layers of a KV-cache far larger than the processor's caches, so that keys and values come from
memory, as between two steps of a model. All kernels and a plain read of memory take turns.
"""

import argparse
import ctypes
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from loadtest.measurement.roofline import Roofline
from loadtest.measurement.spread import ratio_spread, spread
from loadtest.measurement.tables import Column, table
from model.attention.backends import AttentionBackend
from model.attention.kernel_selection import DECODE_KERNELS, KernelContext, Unavailable
from model.attention.kv_cache import KVCache
from model.attention.layer_spec import AttentionForm
from model.attention.metadata import AttentionMetadata
from model.attention.native import NativeAttention
from model.attention.paged import DecodeKernel
from model.attention.sdpa import SdpaAttention
from model.config import ModelConfig
from model.kernels.build import CACHE, BuildError
from model.kernels.kernel_library import KernelLibrary, load_kernels
from service.engine.execution.cuda_graphs import Capture, CudaCapture

_BLOCK_SIZE = 16
# Bytes of keys and values, and of the array that the memory probe reads: several times the largest cache of a device.
_COLD_BYTES, _READ_BYTES = {"cpu": 160 * 2**20, "cuda": 2**29}, {"cpu": 256 * 2**20, "cuda": 4 * 2**30}
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

    def __init__(self, shape: str, dtype_name: str, batch: int, context: int, device: str = "cpu") -> None:
        self.name = f"{shape} {dtype_name} B{batch} T{context}"
        self.batch, self.context, self.device = batch, context, device
        config, self.dtype = shape_config(shape), _DTYPES[dtype_name]
        self.layer_bytes = batch * context * 2 * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        self.num_layers = max(4, _COLD_BYTES[device] // self.layer_bytes)
        self.config = ModelConfig.from_dict(config.to_dict() | {"num_layers": self.num_layers})
        blocks = torch.randperm(batch * -(-context // _BLOCK_SIZE), generator=torch.Generator().manual_seed(0))
        self.tables_BN = blocks.view(batch, -1)
        self.cache = KVCache(
            self.config, num_blocks=len(blocks), block_size=_BLOCK_SIZE, dtype=self.dtype, device=device
        )
        for pool in (self.cache.keys_LNPKD, self.cache.values_LNPKD):
            pool.normal_()
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.qkv = [torch.randn(batch, count, config.head_dim, device=device).to(self.dtype) for count in heads]
        scale = config.head_dim**-0.5
        self.forms = [AttentionForm(layer=n, scale=scale, window=None, bias=None) for n in range(self.num_layers)]

    def backend_passes(self, backends: Mapping[str, AttentionBackend]) -> dict[str, Callable[[], object]]:
        """Return a pass over all layers for each attention backend."""
        return {name: partial(self._run_backend, backend) for name, backend in backends.items()}

    def _run_backend(self, backend: AttentionBackend) -> None:
        last = self.context - 1
        metadata = AttentionMetadata(
            query_lengths=(1,) * self.batch,
            context_lengths=(self.context,) * self.batch,
            positions_T=torch.full((self.batch,), last),
            slot_mapping_T=self.tables_BN[:, last // _BLOCK_SIZE] * _BLOCK_SIZE + last % _BLOCK_SIZE,
            block_tables_BN=self.tables_BN,
        )
        for form in self.forms:
            backend.attend(*self.qkv, form=form, metadata=metadata, kv_cache=self.cache)

    @torch.inference_mode()
    def captured_kernels(self, capture: Capture) -> dict[str, Callable[[], object]]:
        """Return a captured pass over all layers for each decode kernel that works on the device."""
        tables_BN = self.tables_BN.to(self.device)
        positions_B = torch.full((self.batch,), self.context - 1, device=self.device)

        def all_layers(kernel: DecodeKernel) -> torch.Tensor:
            outputs = [kernel(self.qkv[0], form, positions_B, tables_BN, self.cache) for form in self.forms]
            return torch.stack(outputs).sum()

        place = KernelContext(
            config=self.config, device=torch.device(self.device), dtype=self.dtype, block_size=_BLOCK_SIZE
        )
        passes: dict[str, Callable[[], object]] = {}
        for name, make in DECODE_KERNELS.items():
            try:
                passes[name] = capture(partial(all_layers, make(place)))
            except Unavailable as error:
                show(f"without {name}: {error}")
        return passes


def memory_probe(library: KernelLibrary, threads: int) -> Callable[[], float]:
    """Return a function that reads a large array once by the native kernels and returns bytes per second."""
    words = torch.ones(_READ_BYTES["cpu"] // 8, dtype=torch.int64)
    read = library.function("kvasir_read", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, result=ctypes.c_uint64)
    return lambda: words.nbytes / _seconds(lambda: read(words.data_ptr(), words.numel(), threads))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.inference_mode()
def measure(
    case: DecodeCase, passes: Mapping[str, Callable[[], object]], repeats: int, probe: Callable[[], float]
) -> dict[str, Any]:
    """Measure the passes of all kernels and the memory read, in turn. Bandwidth and speedup are the first kernel's."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    bandwidth = []
    for number in range(repeats + 1):
        bandwidth += [probe()] if number else []
        for name, run in passes.items():
            taken = _seconds(run) / case.num_layers
            seconds[name] += [taken] if number else []  # the first pass is a warm-up
    first, *others = passes
    rates = [case.layer_bytes / each for each in seconds[first]]
    return {
        "case": case.name,
        "batch": case.batch,
        "context": case.context,
        **{f"{name}_us": spread(1e6 * each for each in values) for name, values in seconds.items()},
        "gb_per_second": spread(rate / 1e9 for rate in rates),
        "memory_gb_per_second": spread(rate / 1e9 for rate in bandwidth),
        "share_of_memory": ratio_spread(rates, bandwidth),
        **{f"times_{name}": ratio_spread(seconds[name], seconds[first]) for name in others},
    }


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(arguments.threads)
    is_cpu, facts = arguments.device == "cpu", {"kind": "kernels", "threads": arguments.threads}
    if is_cpu:
        try:
            library = load_kernels(CACHE)
        except BuildError as error:
            raise MeasurementFailed(str(error)) from error
        facts["level"] = library.level
        probe = memory_probe(library, arguments.threads)
    else:
        facts["device"] = str(torch.cuda.get_device_properties(0))
        probe = Roofline("bfloat16", "cuda", _READ_BYTES["cuda"]).bytes_per_second
    rows = []
    for sizes in itertools.product(arguments.shape, arguments.dtype, arguments.batch, arguments.context):
        case = DecodeCase(*sizes, arguments.device)
        show(case.name)
        if is_cpu:
            backends: dict[str, AttentionBackend] = {"native": NativeAttention(library), "sdpa": SdpaAttention()}
            passes = case.backend_passes(backends)
        else:
            passes = case.captured_kernels(CudaCapture())
        rows.append(measure(case, passes, arguments.repeats, probe))
    if is_cpu:
        print(table(COLUMNS, rows))
    return facts | {"rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 0; 1 if the kernels cannot be loaded."""
    parser = benchmark_parser("loadtest.inprocess.bench_kernels", "Measure the decode attention kernels of a device.")
    add = parser.add_argument
    add("--device", choices=sorted(_COLD_BYTES), default="cpu")
    add("--shape", nargs="+", choices=SHAPE_SIZES, default=["S", "M"])
    add("--dtype", nargs="+", choices=_DTYPES, default=["bfloat16"])
    add("--batch", nargs="+", type=int, default=[1, 4, 16, 64])
    add("--context", nargs="+", type=int, default=[128, 512, 1024])
    add("--threads", type=int, default=torch.get_num_threads())
    add("--repeats", type=int, default=5)
    arguments = read_arguments(parser, argv)
    return run_benchmark(parser, arguments, lambda: _run(arguments), prints_json=arguments.device == "cuda")


if __name__ == "__main__":
    sys.exit(main())
