"""Prefill steps of one prompt on a GPU, with piecewise CUDA graphs and without: a part of `loadtest.gpu.bench_gpu`."""

import time
from functools import partial
from typing import Any

import torch

from loadtest.gpu.bench_setting import BLOCK_SIZE, Bench
from loadtest.gpu.measurements import random_model
from loadtest.measurement.step_work import WorkFormula
from model.attention.kernel_selection import choose
from model.attention.metadata import AttentionMetadata
from model.sampling.params import SamplingParams
from service.engine.execution.gpu_setup import pieces_for
from service.engine.execution.model_inputs import ModelInputs
from service.engine.execution.model_runner import ModelRunner
from service.engine.execution.prefill_graphs import capture_prompts, uncut


def prompt_inputs(num_tokens: int) -> ModelInputs:
    """Return the inputs of a step with one whole prompt, which samples the token after it."""
    positions_T = torch.arange(num_tokens)
    return ModelInputs(
        token_ids_T=positions_T % 50,
        metadata=AttentionMetadata(
            query_lengths=(num_tokens,),
            context_lengths=(num_tokens,),
            positions_T=positions_T,
            logit_rows_R=positions_T[-1:],
            slot_mapping_T=positions_T,
            block_tables_BN=torch.arange(-(-num_tokens // BLOCK_SIZE))[None],
        ),
        params=(SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),),
        all_greedy=True,
        wants_logprobs=False,
        positions=(num_tokens,),
        forbidden=(),
        rules=(),
        prompt_rows=(),
    )


def prefill(bench: Bench) -> dict[str, Any]:
    """Measure prefill steps with piecewise CUDA graphs and without, against the device's limits."""
    chosen, machine = choose(bench.place()), bench.probe()
    model = random_model(bench.shape, bench, chosen)
    most = 16 * max(bench.batches)
    blocks = -(-most // BLOCK_SIZE)
    runner = ModelRunner(model, num_blocks=blocks, block_size=BLOCK_SIZE, vocab_size=bench.shape.vocab_size)
    weight_type = str(bench.dtype).removeprefix("torch.")
    formula = WorkFormula(config=bench.shape, weight_type=weight_type, kv_value_bytes=bench.dtype.itemsize)
    counts = [count for count in (most // 16, most // 4, most // 2, most) if count <= bench.shape.max_context_length]
    steps = {count: prompt_inputs(count) for count in counts}
    stepwise = {count: bench.seconds(partial(runner.run, step), 3) for count, step in steps.items()}
    began = time.perf_counter()
    sizes = capture_prompts(model, pieces_for(bench.device) or uncut, most)
    bench.wait()
    record_seconds = time.perf_counter() - began
    rows = []
    for count, step in steps.items():
        replayed = bench.seconds(partial(runner.run, step), 3)
        bound = formula.prompt(num_tokens=count, tokens_per_step=count).bound_seconds(machine)
        rows.append(
            {
                "tokens": count,
                "ms": 1e3 * replayed.median,
                "ms_values": [1e3 * value for value in replayed.values],
                "ms_without_graphs": 1e3 * stepwise[count].median,
                "bound_ms": 1e3 * bound,
                "of_the_bound": bound / replayed.median,
            }
        )
    return {"attention": str(chosen), "record_seconds": record_seconds, "recorded": sizes, "rows": rows}
