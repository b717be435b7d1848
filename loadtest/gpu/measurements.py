"""Measurements of `loadtest.gpu.bench_gpu`, a function per part. The same code runs with small sizes on a CPU. Imports
torch.

Legend: B sequences, H query heads, K key/value heads, D head dimension, N blocks of a table.
"""

import itertools
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loadtest.gpu.bench_setting import BLOCK_SIZE, Bench
from loadtest.inprocess.closed_loop import greedy, run_closed
from loadtest.inprocess.engine import InProcess
from loadtest.measurement.roofline import Machine, WorkFormula
from model.attention.kernel_selection import DECODE_KERNELS, SelectedKernels, Unavailable, choose
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
from service.engine.engine import Engine
from service.engine.execution.gpu_setup import fuse_for_gpu
from service.engine.execution.model_inputs import ModelInputs
from service.engine.execution.model_runner import ModelRunner

_ROUNDS = 3
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def card(bench: Bench) -> dict[str, Any]:
    """Return the device, its limits, and the attention kernels that work on it."""
    machine = bench.probe()
    chosen = choose(bench.place())
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


def attention(bench: Bench) -> dict[str, Any]:
    """Measure one layer's decode attention with every available kernel: time, bytes/s, and batch invariance."""
    cases = itertools.product(bench.attention, bench.attention_contexts, bench.batches)
    return {"rows": [_attention(bench, heads, context, batch) for heads, context, batch in cases]}


@torch.inference_mode()
def _attention(bench: Bench, heads: tuple[int, int, int], context: int, batch: int) -> dict[str, Any]:
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
            way = make(bench.place(config))
        except Unavailable as error:
            row[name] = {"absent": str(error)}
            continue
        whole = way(q_BHD, forms[0], positions_B, tables_BN, cache)
        alone = way(q_BHD[-1:], forms[0], positions_B[-1:], tables_BN[-1:], cache)

        def all_layers(way: DecodeKernel = way) -> Tensor:
            return torch.stack([way(q_BHD, form, positions_B, tables_BN, cache) for form in forms]).sum()

        seconds = bench.seconds(bench.capture()(all_layers), 3).median
        row[name] = {
            "us": 1e6 * seconds / num_layers,
            "bytes_per_second": layer_bytes * num_layers / seconds,
            "same_bits_alone": torch.equal(whole[-1:], alone),
        }
    return row


def random_model(config: ModelConfig, bench: Bench, chosen: SelectedKernels) -> Transformer:
    """Return a model of random weights on the device. Step time does not depend on the weights' values."""
    with torch.device("meta"):
        model = Transformer(config, chosen.backend)
    tensors = {
        name: torch.empty(shape, dtype=bench.dtype, device=bench.device).normal_(0.0, 0.02)
        for name, shape in config.parameter_shapes().items()
    }
    model.load_state_dict(tensors, strict=True, assign=True)
    model = model.to(bench.device).eval().requires_grad_(False)
    fuse_for_gpu(model)
    return model


def step_inputs(metadata: AttentionMetadata, token_ids_T: Tensor, num_sequences: int) -> ModelInputs:
    """Return the inputs of a step that samples a token for each of the first `num_sequences` sequences."""
    lengths = metadata.context_lengths[:num_sequences]
    return ModelInputs(
        token_ids_T=token_ids_T,
        metadata=metadata,
        params=(_GREEDY,) * num_sequences,
        all_greedy=True,
        wants_logprobs=False,
        positions=lengths,
        forbidden=(),
        rules=(),
        prompt_rows=(),
    )


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
    return step_inputs(metadata, torch.zeros(num_rows, dtype=torch.int64), batch)


def decode(bench: Bench) -> dict[str, Any]:
    """Measure decode steps of the large model, with and without CUDA graphs, against memory bandwidth.

    A step begins with integers on the host and ends with token ids on the host.
    """
    chosen = choose(bench.place())
    machine = bench.probe()
    weight_type = str(bench.dtype).removeprefix("torch.")
    recorded, figures = timed_steps(bench, random_model(bench.shape, bench, chosen), weight_type, machine)
    return {
        "attention": str(chosen),
        "parameters": bench.shape.num_parameters,
        "bytes_per_second": machine.bytes_per_second,
        **figures,
        "kernels": [kernels(bench, recorded, batch) for batch in (bench.batches[0], bench.batches[-1])],
    }


def quantized(bench: Bench) -> dict[str, Any]:
    """Measure decode steps with quantized matrices, in each format that the device supports."""
    chosen, machine = choose(bench.place()), bench.probe()
    figures: dict[str, Any] = {"bytes_per_second": machine.bytes_per_second}
    for name in FORMATS:
        try:
            quantization = select_quantization(name, bench.device, bench.dtype)
        except QuantizationError as error:
            figures[name] = {"absent": str(error)}
            continue
        model = random_model(bench.shape, bench, chosen)
        replace_linears_by(model, quantization.make)
        recorded, steps = timed_steps(bench, model, name, machine)
        facts = {"matrices": str(quantization)}
        figures[name] = facts | steps | {"kernels": [kernels(bench, recorded, bench.batches[0])]}
    return figures


def timed_steps(
    bench: Bench, model: Transformer, weight_type: str, machine: Machine
) -> tuple[ModelRunner, dict[str, Any]]:
    """Time a decode step of each batch size, with and without CUDA graphs. Return the graph runner and the figures."""
    formula = WorkFormula(config=bench.shape, weight_type=weight_type, kv_value_bytes=bench.dtype.itemsize)
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
        stepwise = bench.seconds(partial(plain.run, inputs), 3)
        same = recorded.run(inputs).token_ids == plain.run(inputs).token_ids
        rows.append(
            {
                "batch": batch,
                "context": bench.context,
                "ms": 1e3 * replayed.median,
                "ms_values": [1e3 * value for value in replayed.values],
                "ms_without_graphs": 1e3 * stepwise.median,
                "bound_ms": 1e3 * bound,
                "of_the_bound": bound / replayed.median,
                "tokens_per_second": batch / replayed.median,
                "same_tokens": same,
            }
        )
    recordings = [[bucket.rows, bucket.width] for bucket in shapes]
    return recorded, {"record_seconds": record_seconds, "recorded": recordings, "rows": rows}


def kernels(bench: Bench, runner: ModelRunner, batch: int, *, count: int = 20) -> dict[str, Any]:
    """Return the kernels that take most of a step's time on the device."""
    inputs = decode_inputs(batch, bench.context)
    on_gpu = bench.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
        for _ in range(3):
            runner.run(inputs)
        bench.wait()
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    taken = sorted(profile.key_averages(), key=lambda average: -getattr(average, key))
    figures = [
        {"name": a.key[:80], "us_a_step": getattr(a, key) / 3, "calls_a_step": a.count / 3} for a in taken[:count]
    ]
    return {"batch": batch, "us_a_step": sum(getattr(a, key) for a in taken) / 3, "most": figures}


def tokens_per_second(engine: Engine, texts: Sequence[Sequence[int]], output: int, *, prefix: str) -> float:
    """Run all prompts at once, greedily. Return generated tokens per second of the whole run, prefill included."""
    submits = [greedy(f"{prefix}-{number}", text, output) for number, text in enumerate(texts)]
    return run_closed(engine, submits, num_streams=len(submits)).tokens_per_second


def engine(bench: Bench, checkpoint: Path) -> dict[str, Any]:
    """Measure a checkpoint as the service runs it: tokens/s over the number of streams."""
    built = InProcess.open(ModelSettings(checkpoint=checkpoint, max_num_running=256, max_batched_tokens=2048))
    built.engine.warm_up()
    rows = []
    for streams in bench.streams:
        texts = [[(7 * number + place) % 250 for place in range(32)] for number in range(streams)]
        values = [
            tokens_per_second(built.engine, texts, bench.output, prefix=f"{streams}-{number}")
            for number in range(_ROUNDS)
        ]
        rows.append({"streams": streams, "tokens_per_second": statistics.median(values), "values": values})
    return {"model": built.facts, "engine": str(built.built), "rows": rows}
