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
from pathlib import Path
from typing import Any

import torch

from loadtest.measurement.model_shapes import shape_config
from loadtest.measurement.provenance import provenance, quiet_or_warned, tell
from loadtest.measurement.shape_names import SHAPE_SIZES
from loadtest.measurement.spread import Spread
from model.attention.backends import AttentionBackend
from model.attention.kv_cache import KVCache
from model.attention.layer_spec import AttentionForm
from model.attention.metadata import AttentionMetadata
from model.attention.native import NativeAttention
from model.attention.sdpa import SdpaAttention
from model.kernels.build import CACHE, BuildError
from model.kernels.kernel_library import KernelLibrary, load_kernels

PROGRAM = "python -m loadtest.inprocess.bench_kernels"
_BLOCK_SIZE = 16
_COLD_BYTES = 160 * 2**20  # bytes of keys and values: several times a processor's largest cache
_READ_BYTES = 256 * 2**20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SHORTEST = 32  # shortest ragged context, in tokens


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
        needs = [-(-length // _BLOCK_SIZE) for length in case.contexts]
        num_blocks = sum(needs)
        self.num_layers = max(4, _COLD_BYTES // self.layer_bytes)
        sizes = SHAPE_SIZES[case.shape] | {"num_layers": self.num_layers}
        config = type(config).from_dict({**config.to_dict(), **sizes})
        self.cache = KVCache(config, num_blocks=num_blocks, block_size=_BLOCK_SIZE, dtype=dtype, device="cpu")
        for pool in (self.cache.keys_LNPKD, self.cache.values_LNPKD):
            pool.copy_(torch.randn(pool.shape[1:]).to(dtype))
        blocks = iter(torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist())
        tables = [list(itertools.islice(blocks, need)) for need in needs]
        width = max(needs)
        positions = [range(length - case.queries, length) for length in case.contexts]
        slots = [
            table[position // _BLOCK_SIZE] * _BLOCK_SIZE + position % _BLOCK_SIZE
            for table, of in zip(tables, positions, strict=True)
            for position in of
        ]
        self.fields: dict[str, Any] = {
            "query_lengths": (case.queries,) * len(case.contexts),
            "context_lengths": case.contexts,
            "positions_T": torch.tensor([position for of in positions for position in of]),
            "slot_mapping_T": torch.tensor(slots),
            "block_tables_BN": torch.tensor([table + [0] * (width - len(table)) for table in tables]),
        }
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.inputs = [torch.randn(len(slots), count, config.head_dim).to(dtype) for count in heads]
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
        "native_us": Spread(tuple(1e6 * seconds for seconds in native)).to_dict(),
        "sdpa_us": Spread(tuple(1e6 * seconds for seconds in sdpa)).to_dict(),
        "gb_per_second": Spread(tuple(rate / 1e9 for rate in rates)).to_dict(),
        "memory_gb_per_second": Spread(tuple(rate / 1e9 for rate in bandwidth)).to_dict(),
        "share_of_memory": Spread.of_ratios(rates, bandwidth).to_dict(),
        "times_sdpa": Spread.of_ratios(sdpa, native).to_dict(),
    }


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the requested cases. Ragged contexts are uniformly random; one of them is the longest."""
    made = []
    for shape, dtype, batch, context in itertools.product(
        arguments.shape, arguments.dtype, arguments.batch, arguments.context
    ):
        contexts = [context] * batch
        if arguments.ragged:
            generator = random.Random(0)
            contexts[1:] = [generator.randint(_SHORTEST, context) for _ in contexts[1:]]
        queries = context if arguments.prefill else 1
        if arguments.prefill:
            contexts = [context] * batch
        made.append(Case(shape=shape, dtype=dtype, queries=queries, contexts=tuple(contexts)))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 0; 1 if the kernels cannot be loaded."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPE_SIZES, default=["S", "M"])
    parser.add_argument("--dtype", nargs="+", choices=_DTYPES, default=["bfloat16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--context", nargs="+", type=int, default=[128, 512, 1024])
    parser.add_argument("--ragged", action="store_true", help="random context lengths up to --context")
    parser.add_argument("--prefill", action="store_true", help="measure whole prompts instead of decode steps")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON output file")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    try:
        library = load_kernels(CACHE)
    except BuildError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    busy, began = quiet_or_warned(PROGRAM), time.monotonic()
    probe = memory_probe(library, arguments.threads)
    probe()
    print(f"level {library.level}, {arguments.threads} threads\n")
    print("| case | native µs per layer | GB/s | memory GB/s | share | sdpa µs | speedup over sdpa |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for case in cases(arguments):
        row = measure(case, library, repeats=arguments.repeats, probe=probe)
        rows.append(row)
        figures = {name: value["median"] for name, value in row.items() if isinstance(value, dict)}
        print(
            f"| {case.name} | {figures['native_us']:.0f} | {figures['gb_per_second']:.1f} "
            f"| {figures['memory_gb_per_second']:.1f} | {figures['share_of_memory']:.2f} "
            f"| {figures['sdpa_us']:.0f} | {figures['times_sdpa']:.2f} |",
            flush=True,
        )
    if arguments.out is not None:
        given = sys.argv[1:] if argv is None else argv
        facts = {
            "kind": "kernels",
            "level": library.level,
            "threads": arguments.threads,
            "other_work_cores": busy,
        }
        took = {"took_seconds": round(time.monotonic() - began, 1)}
        tell(provenance(PROGRAM, given) | facts | took | {"rows": rows}, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
