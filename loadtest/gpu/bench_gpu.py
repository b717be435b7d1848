"""Benchmarks of a GPU that `kvasir bench` does not cover, as run by `loadtest/gpu/suite.sh`.

    python -m loadtest.gpu.bench_gpu {card,attention} --out FILE

Without a CUDA device a part is reported as absent. Legend: B sequences, H query heads, D head dimension, N blocks.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loadtest.measurement.model_shapes import shape_config
from loadtest.measurement.provenance import provenance, tell
from loadtest.measurement.roofline import Roofline
from model.attention.kernel_selection import DECODE_KERNELS, KernelContext, Unavailable, choose
from model.attention.kv_cache import KVCache
from model.attention.layer_spec import AttentionForm
from model.attention.paged import DecodeKernel
from model.config import ModelConfig
from service.engine.execution.cuda_graphs import CudaCapture, call_again

PROGRAM = "python -m loadtest.gpu.bench_gpu"
BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuBench:
    """Device and sizes of the benchmarks.

    heads: numbers of query heads, of key/value heads, and head dimension.
    """

    device: torch.device
    dtype: torch.dtype
    heads: tuple[tuple[int, int, int], ...] = ((12, 2, 128), (32, 8, 128), (6, 6, 64))
    contexts: tuple[int, ...] = (1024, 8192)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    probe_bytes: int = 4 * 2**30
    probe_side: int = 8192
    repeats: int = 5

    def kernel_context(self, config: ModelConfig) -> KernelContext:
        """Return the device, dtype and model for which attention kernels are chosen."""
        return KernelContext(config=config, device=self.device, dtype=self.dtype, block_size=BLOCK_SIZE)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the time per call of some work, captured as a CUDA graph: the median of several measurements."""
        run = (CudaCapture() if self.device.type == "cuda" else call_again)(work)
        values = []
        for _ in range(self.repeats):
            run()
            self._wait()
            began = time.perf_counter()
            for _ in range(3):
                run()
            self._wait()
            values.append((time.perf_counter() - began) / 3)
        return statistics.median(values)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def card(bench: GpuBench) -> dict[str, Any]:
    """Return the device, its limits, and the attention kernels that work on it."""
    weight_type = str(bench.dtype).removeprefix("torch.")
    machine = Roofline(weight_type, bench.device.type, bench.probe_bytes, (bench.probe_side,)).probe()
    chosen = choose(bench.kernel_context(shape_config("qwen2-1.5b")))
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "bytes_per_second": machine.bytes_per_second,
        "flops_per_second": machine.flops_per_second,
        "attention": str(chosen),
        "left_out": list(chosen.left_out),
    }
    if bench.device.type == "cuda":
        properties = torch.cuda.get_device_properties(bench.device)
        facts |= {
            "name": properties.name,
            "bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return facts


def attention(bench: GpuBench) -> dict[str, Any]:
    """Measure one layer's decode attention with every available kernel: time, bytes/s, and batch invariance."""
    cases = itertools.product(bench.heads, bench.contexts, bench.batches)
    return {"rows": [_attention(bench, *case) for case in cases]}


@torch.inference_mode()
def _attention(bench: GpuBench, heads: tuple[int, int, int], context: int, batch: int) -> dict[str, Any]:
    """Measure one case. All layers are captured in one graph, so that no data is read twice from a cache."""
    num_heads, kv_heads, size = heads
    blocks_each = -(-context // BLOCK_SIZE)
    layer_bytes = 2 * batch * blocks_each * BLOCK_SIZE * kv_heads * size * bench.dtype.itemsize
    num_layers = max(1, min(64, bench.probe_bytes // 8 // layer_bytes))
    sizes = {"num_layers": num_layers, "num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": size}
    config = ModelConfig.from_dict(shape_config("qwen2-1.5b").to_dict() | sizes)
    blocks = batch * blocks_each
    cache = KVCache(config, num_blocks=blocks, block_size=BLOCK_SIZE, dtype=bench.dtype, device=bench.device)
    for pool in (cache.keys_LNPKD, cache.values_LNPKD):
        pool.normal_()
    q_BHD = torch.randn((batch, num_heads, size), device=bench.device).to(bench.dtype)
    tables_BN = torch.randperm(blocks, device=bench.device).view(batch, blocks_each)
    positions_B = torch.full((batch,), context - 1, device=bench.device)
    forms = [AttentionForm(layer=layer, scale=size**-0.5, window=None, bias=None) for layer in range(num_layers)]
    row: dict[str, Any] = {"heads": heads, "context": context, "batch": batch, "layers": num_layers}
    for name, make in DECODE_KERNELS.items():
        try:
            way = make(bench.kernel_context(config))
        except Unavailable as error:
            row[name] = {"absent": str(error)}
            continue
        whole = way(q_BHD, forms[0], positions_B, tables_BN, cache)
        alone = way(q_BHD[-1:], forms[0], positions_B[-1:], tables_BN[-1:], cache)

        def all_layers(way: DecodeKernel = way) -> Tensor:
            return torch.stack([way(q_BHD, form, positions_B, tables_BN, cache) for form in forms]).sum()

        seconds = bench.seconds(all_layers)
        row[name] = {
            "us": 1e6 * seconds / num_layers,
            "bytes_per_second": layer_bytes * num_layers / seconds,
            "same_bits_alone": torch.equal(whole[-1:], alone),
        }
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one part and write JSON. Return 0, also without a device, which the JSON reports."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Measure one part of the GPU benchmarks.")
    parser.add_argument("part", choices=("card", "attention"))
    parser.add_argument("--out", type=Path, help="JSON output file (default: standard output)")
    parsed = parser.parse_args(given)
    figures = {"absent": "no CUDA device"}
    if torch.cuda.is_available():
        bench = GpuBench(device=torch.device("cuda"), dtype=torch.bfloat16)
        figures = card(bench) if parsed.part == "card" else attention(bench)
    tell(provenance(PROGRAM, given) | figures, parsed.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
