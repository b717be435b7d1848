"""Benchmarks of a GPU, a part at a time, as run by `loadtest/gpu/suite.sh`.

    python -m loadtest.gpu.bench_gpu PART --out FILE [--checkpoint DIR]

Without a CUDA device a part is reported as absent. Legend: B sequences, H query heads, D head dimension, N blocks.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loadtest.inprocess.closed_loop import greedy, run_closed
from loadtest.inprocess.engine import InProcess
from loadtest.measurement.model_shapes import shape_config
from loadtest.measurement.provenance import provenance, tell
from loadtest.measurement.roofline import Machine, Roofline, WorkFormula
from model.attention.kernel_selection import DECODE_KERNELS, KernelContext, SelectedKernels, Unavailable, choose
from model.attention.kv_cache import KVCache
from model.attention.layer_spec import AttentionForm
from model.attention.metadata import AttentionMetadata
from model.attention.paged import DecodeKernel
from model.config import ModelConfig
from model.gpu.quantization import FORMATS, QuantizationError
from model.gpu.quantization import choose as select_quantization
from model.nn.linear import replace_linears_by
from model.nn.transformer import Transformer
from model.sampling.params import SamplingParams
from service.config.settings import ModelSettings
from service.engine.execution.cuda_graphs import Capture, CudaCapture, call_again
from service.engine.execution.gpu_setup import fuse_for_gpu
from service.engine.execution.model_inputs import ModelInputs
from service.engine.execution.model_runner import ModelRunner

PROGRAM = "python -m loadtest.gpu.bench_gpu"
BLOCK_SIZE = 16
_ROUNDS = 3
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


# Shape of Qwen2 with 1.5 billion parameters (its config.json).
QWEN2: Mapping[str, Any] = shape_config("qwen3-0.6b").to_dict() | {
    "max_context_length": 32_768,
    "hidden_size": 1536,
    "num_heads": 12,
    "num_kv_heads": 2,
    "mlp_size": 8960,
    "attention_bias": True,
    "attention_out_bias": False,
    "qk_norm": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuBench:
    """Device and sizes of the benchmarks.

    batches, context: sizes of the decode steps of `shape`. attention: numbers of query heads, key/value heads and head
    dimension. output, streams: tokens of completions of a whole engine, and its concurrent requests.
    """

    device: torch.device
    dtype: torch.dtype
    shape: ModelConfig
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    context: int = 1024
    attention: tuple[tuple[int, int, int], ...] = ((12, 2, 128), (32, 8, 128), (6, 6, 64))
    attention_contexts: tuple[int, ...] = (1024, 8192)
    probe_bytes: int = 4 * 2**30
    probe_side: int = 8192
    output: int = 512
    streams: tuple[int, ...] = (1, 16, 64, 256)
    repeats: int = 5

    @property
    def weight_type(self) -> str:
        """Name of the dtype, a key of `WEIGHT_BYTES`."""
        return str(self.dtype).removeprefix("torch.")

    def kernel_context(self, config: ModelConfig) -> KernelContext:
        """Return the device, dtype and model for which attention kernels are chosen."""
        return KernelContext(config=config, device=self.device, dtype=self.dtype, block_size=BLOCK_SIZE)

    def probe(self) -> Machine:
        """Measure the device's limits: reading an array larger than any cache, and a product of square matrices."""
        return Roofline(self.weight_type, self.device.type, self.probe_bytes, (self.probe_side,)).probe()

    def capture(self) -> Capture:
        """Return the capture function: CUDA graphs, or on other devices the plain function."""
        return CudaCapture() if self.device.type == "cuda" else call_again

    def wait(self) -> None:
        """Wait until the device has finished all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], times: int) -> list[float]:
        """Return the mean seconds per call over `times` calls in a row, for each repeat."""
        work()
        values = []
        for _ in range(self.repeats):
            self.wait()
            began = time.perf_counter()
            for _ in range(times):
                work()
            self.wait()
            values.append((time.perf_counter() - began) / times)
        return values


def card(bench: GpuBench) -> dict[str, Any]:
    """Return the device, its limits, and the attention kernels that work on it."""
    machine = bench.probe()
    chosen = choose(bench.kernel_context(bench.shape))
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
    cases = itertools.product(bench.attention, bench.attention_contexts, bench.batches)
    return {"rows": [_attention(bench, *case) for case in cases]}


@torch.inference_mode()
def _attention(bench: GpuBench, heads: tuple[int, int, int], context: int, batch: int) -> dict[str, Any]:
    """Measure one case. All layers are captured in one graph, so that no data is read twice from a cache."""
    num_heads, kv_heads, size = heads
    blocks_each = -(-context // BLOCK_SIZE)
    layer_bytes = 2 * batch * blocks_each * BLOCK_SIZE * kv_heads * size * bench.dtype.itemsize
    num_layers = max(1, min(64, bench.probe_bytes // 8 // layer_bytes))
    sizes = {"num_layers": num_layers, "num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": size}
    config = ModelConfig.from_dict(bench.shape.to_dict() | sizes)
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

        seconds = statistics.median(bench.seconds(bench.capture()(all_layers), 3))
        row[name] = {
            "us": 1e6 * seconds / num_layers,
            "bytes_per_second": layer_bytes * num_layers / seconds,
            "same_bits_alone": torch.equal(whole[-1:], alone),
        }
    return row


def random_model(bench: GpuBench, chosen: SelectedKernels) -> Transformer:
    """Return the large model with random weights on the device. Step time does not depend on the weights' values."""
    with torch.device("meta"):
        model = Transformer(bench.shape, chosen.backend)
    tensors = {
        name: torch.empty(shape, dtype=bench.dtype, device=bench.device).normal_(0.0, 0.02)
        for name, shape in bench.shape.parameter_shapes().items()
    }
    model.load_state_dict(tensors, strict=True, assign=True)
    model = model.to(bench.device).eval().requires_grad_(False)
    fuse_for_gpu(model)
    return model


def decode_inputs(batch: int, context: int) -> ModelInputs:
    """Return the inputs of a decode step of `batch` sequences of one length, padded to at least four rows."""
    num_rows, blocks_each, last = max(4, batch), -(-context // BLOCK_SIZE), context - 1
    tables_BN = torch.arange(num_rows * blocks_each).view(num_rows, blocks_each)
    metadata = AttentionMetadata(
        query_lengths=(1,) * num_rows,
        context_lengths=(context,) * num_rows,
        positions_T=torch.full((num_rows,), last),
        logit_rows_R=torch.arange(num_rows),
        slot_mapping_T=tables_BN[:, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE,
        block_tables_BN=tables_BN,
    )
    return ModelInputs(
        token_ids_T=torch.zeros(num_rows, dtype=torch.int64),
        metadata=metadata,
        params=(_GREEDY,) * batch,
        all_greedy=True,
        wants_logprobs=False,
        positions=(context,) * batch,
        forbidden=(),
        rules=(),
        prompt_rows=(),
    )


def decode(bench: GpuBench) -> dict[str, Any]:
    """Measure decode steps of the large model, with and without CUDA graphs, against memory bandwidth."""
    chosen, machine = choose(bench.kernel_context(bench.shape)), bench.probe()
    recorded, figures = timed_steps(bench, random_model(bench, chosen), bench.weight_type, machine)
    return {
        "attention": str(chosen),
        "parameters": bench.shape.num_parameters,
        "bytes_per_second": machine.bytes_per_second,
        **figures,
        "kernels": [kernels(bench, recorded, batch) for batch in (bench.batches[0], bench.batches[-1])],
    }


def quantized(bench: GpuBench) -> dict[str, Any]:
    """Measure decode steps with quantized matrices, in each format that the device supports."""
    chosen, machine = choose(bench.kernel_context(bench.shape)), bench.probe()
    figures: dict[str, Any] = {"bytes_per_second": machine.bytes_per_second}
    for name in FORMATS:
        try:
            quantization = select_quantization(name, bench.device, bench.dtype)
        except QuantizationError as error:
            figures[name] = {"absent": str(error)}
            continue
        model = random_model(bench, chosen)
        replace_linears_by(model, quantization.make)
        recorded, steps = timed_steps(bench, model, name, machine)
        facts = {"matrices": str(quantization)}
        figures[name] = facts | steps | {"kernels": [kernels(bench, recorded, bench.batches[0])]}
    return figures


def timed_steps(
    bench: GpuBench, model: Transformer, weight_type: str, machine: Machine
) -> tuple[ModelRunner, dict[str, Any]]:
    """Time a decode step of each batch size, with and without CUDA graphs. Return the graph runner and the figures.

    A step begins with integers on the host and ends with token ids on the host.
    """
    formula = WorkFormula(bench.shape, weight_type, bench.dtype.itemsize)
    most = max(4, *bench.batches)
    blocks = most * -(-bench.context // BLOCK_SIZE)
    plain, recorded = (
        ModelRunner(model, num_blocks=blocks, block_size=BLOCK_SIZE, vocab_size=bench.shape.vocab_size)
        for _ in range(2)
    )
    began = time.perf_counter()
    shapes = recorded.capture_decodes(bench.capture(), max_rows=most, max_context_length=bench.context)
    bench.wait()
    record_seconds = time.perf_counter() - began
    rows = []
    for batch in bench.batches:
        inputs = decode_inputs(batch, bench.context)
        bound = formula.decode(batch_size=batch, context_length=bench.context).bound_seconds(machine)
        replayed = bench.seconds(partial(recorded.run, inputs), 10)
        seconds = statistics.median(replayed)
        stepwise = statistics.median(bench.seconds(partial(plain.run, inputs), 3))
        same = recorded.run(inputs).token_ids == plain.run(inputs).token_ids
        rows.append(
            {
                "batch": batch,
                "context": bench.context,
                "ms": 1e3 * seconds,
                "ms_values": [1e3 * value for value in replayed],
                "ms_without_graphs": 1e3 * stepwise,
                "bound_ms": 1e3 * bound,
                "of_the_bound": bound / seconds,
                "tokens_per_second": batch / seconds,
                "same_tokens": same,
            }
        )
    buckets = [[bucket.rows, bucket.width] for bucket in shapes]
    return recorded, {"record_seconds": record_seconds, "recorded": buckets, "rows": rows}


def kernels(bench: GpuBench, runner: ModelRunner, batch: int) -> dict[str, Any]:
    """Return the 20 kernels that take most of a decode step's time on the device."""
    inputs = decode_inputs(batch, bench.context)
    on_gpu = bench.device.type == "cuda"
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CUDA if on_gpu else activities.CPU], acc_events=True) as profile:
        for _ in range(3):
            runner.run(inputs)
        bench.wait()
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    taken = sorted(profile.key_averages(), key=lambda average: -getattr(average, key))
    figures = [{"name": a.key[:80], "us_a_step": getattr(a, key) / 3, "calls_a_step": a.count / 3} for a in taken[:20]]
    return {"batch": batch, "us_a_step": sum(getattr(a, key) for a in taken) / 3, "most": figures}


def engine(bench: GpuBench, checkpoint: Path) -> dict[str, Any]:
    """Measure a checkpoint as the service runs it: tokens/s over the number of streams, prefill included."""
    built = InProcess.open(ModelSettings(checkpoint=checkpoint, max_num_running=256, max_batched_tokens=2048))
    built.engine.warm_up()
    rows = []
    for streams in bench.streams:
        prompts = [[(7 * number + place) % 250 for place in range(32)] for number in range(streams)]
        values = []
        for repeat in range(_ROUNDS):
            submits = [greedy(f"{repeat}-{number}", prompt, bench.output) for number, prompt in enumerate(prompts)]
            values.append(run_closed(built.engine, submits, num_streams=streams).tokens_per_second)
        rows.append({"streams": streams, "tokens_per_second": statistics.median(values), "values": values})
    return {"model": built.facts, "engine": str(built.built), "rows": rows}


_PARTS: Mapping[str, Callable[[GpuBench], dict[str, Any]]] = {
    part.__name__: part for part in (card, attention, decode, quantized)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one part and write JSON. Return 0, also without a device, which the JSON reports."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Measure one part of the GPU benchmarks.")
    parser.add_argument("part", choices=(*_PARTS, "engine"))
    parser.add_argument("--out", type=Path, help="JSON output file (default: standard output)")
    text = "checkpoint of the part `engine`"
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/kvasir-9m"), help=text)
    parsed = parser.parse_args(given)
    if torch.cuda.is_available():
        bench = GpuBench(device=torch.device("cuda"), dtype=torch.bfloat16, shape=ModelConfig.from_dict(dict(QWEN2)))
        figures = engine(bench, parsed.checkpoint) if parsed.part == "engine" else _PARTS[parsed.part](bench)
    else:
        figures = {"absent": "no CUDA device"}
    tell(provenance(PROGRAM, given) | figures, parsed.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
