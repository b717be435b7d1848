"""Measurements of `loadtest.gpu.bench_gpu`, a function per part. The same code runs with small sizes on a CPU. Imports
torch.

Legend: B sequences, H query heads, K key/value heads, D head dimension, N blocks of a table.
"""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loadtest.gpu.bench_setting import BLOCK_SIZE, Bench
from loadtest.inprocess.closed_loop import run_closed
from loadtest.measurement.model_shapes import shape_tokenizer
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
from service.engine.engine import Engine
from service.engine.execution.gpu_setup import fuse_for_gpu
from service.engine.execution.model_inputs import ModelInputs
from service.engine.execution.model_runner import ModelRunner
from service.engine.scheduling.config import EngineConfig
from service.ipc.messages import Submit

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
    config = _with_heads(bench.shape, num_layers, *heads)
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
        seconds = bench.seconds(_all_layers(bench, way, q_BHD, forms, positions_B, tables_BN, cache), 3).median
        row[name] = {
            "us": 1e6 * seconds / num_layers,
            "bytes_per_second": layer_bytes * num_layers / seconds,
            "same_bits_alone": torch.equal(whole[-1:], alone),
        }
    return row


def _all_layers(
    bench: Bench,
    way: DecodeKernel,
    q_BHD: Tensor,
    forms: Sequence[AttentionForm],
    positions_B: Tensor,
    tables_BN: Tensor,
    cache: KVCache,
) -> Callable[[], Tensor]:
    """Return a function that replays the attention of all layers as one graph."""

    def compute() -> Tensor:
        return torch.stack([way(q_BHD, form, positions_B, tables_BN, cache) for form in forms]).sum()

    return bench.capture()(compute)


def _with_heads(shape: ModelConfig, num_layers: int, heads: int, kv_heads: int, size: int) -> ModelConfig:
    changed = {"num_layers": num_layers, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": size}
    return ModelConfig.from_dict(shape.to_dict() | changed)


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


def decode_inputs(batch: int, context: int, num_rows: int) -> ModelInputs:
    """Return the inputs of a decode step of `batch` sequences of one length, padded to `num_rows`."""
    blocks_each = -(-context // BLOCK_SIZE)
    tables_BN = torch.arange(num_rows * blocks_each).view(num_rows, blocks_each)
    last = context - 1
    return ModelInputs(
        token_ids_T=torch.zeros(num_rows, dtype=torch.int64),
        metadata=AttentionMetadata(
            query_lengths=(1,) * num_rows,
            context_lengths=(context,) * num_rows,
            positions_T=torch.full((num_rows,), last),
            logit_rows_R=torch.arange(num_rows),
            slot_mapping_T=tables_BN[:, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE,
            block_tables_BN=tables_BN,
        ),
        params=(_GREEDY,) * batch,
        all_greedy=True,
        wants_logprobs=False,
        positions=(context,) * batch,
        forbidden=(),
        rules=(),
        prompt_rows=(),
    )


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
        inputs = decode_inputs(batch, bench.context, max(4, batch))
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
    inputs = decode_inputs(batch, bench.context, max(4, batch))
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


def large_engine(bench: Bench) -> Engine:
    """Return a whole engine with the large model and captured decode steps."""
    chosen = choose(bench.place())
    model = random_model(bench.shape, bench, chosen)
    num_blocks = bench.streams * -(-(bench.prompt + bench.output) // BLOCK_SIZE) + 8
    tokenizer = shape_tokenizer(bench.shape.vocab_size)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_running=bench.streams,
        max_batched_tokens=max(bench.streams, 8 * bench.prompt),
        max_context_length=bench.prompt + bench.output,
        enable_prefix_cache=False,
    )
    return Engine(model, tokenizer, config, capture=bench.capture())


def prompts(bench: Bench, count: int, seed: int) -> list[list[int]]:
    """Return random prompts. No two are alike."""
    rng = random.Random(seed)
    return [[rng.randrange(min(bench.shape.vocab_size, 50_000) - 1) for _ in range(bench.prompt)] for _ in range(count)]


def tokens_per_second(engine: Engine, texts: Sequence[Sequence[int]], output: int, *, prefix: str) -> float:
    """Run all prompts at once, greedily. Return generated tokens per second of the whole run, prefill included."""
    submits = [
        Submit(
            uid=f"{prefix}-{number}",
            attempt=0,
            prompt_token_ids=tuple(text),
            prior_token_ids=(),
            params=SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
            arrival_seconds=time.monotonic(),
            deadline_seconds=None,
        )
        for number, text in enumerate(texts)
    ]
    return run_closed(engine, submits, num_streams=len(submits)).tokens_per_second
