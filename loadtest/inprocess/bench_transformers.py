"""Decode steps of the transformers library's continuous batching: the baseline of loadtest/gpu/suite.sh.

    python -m loadtest.inprocess.bench_transformers --shape qwen2-1.5b --batch 1 64 --context 1024 --out FILE

The model has random weights in the shape of the compared model. The library chooses its attention kernels, CUDA graphs
and cache, and keeps its manager between runs. The first run of a batch size is not timed: it allocates the cache,
captures the graphs and computes the prompts, which later runs take from the prefix cache. A step is timed as in
`loadtest.inprocess.engine`: between tokens of steps in which every sequence gets one. Needs transformers.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from loadtest.client.workload import random_prompt
from loadtest.measurement.benchmark_program import add_options, save_result
from loadtest.measurement.figures import Column, spread, table
from loadtest.measurement.model_shapes import SHAPE_SIZES, shape_config
from model.checkpoint.manifest import read_manifest
from model.config import ModelConfig

_COLUMNS = (
    Column("sequences", "batch_size"),
    Column("context", "context_length"),
    Column("ms per step", "step_ms", ".2f"),
)


def make_model(config: ModelConfig, device: str) -> Any:
    """Return a model of the transformers library with random weights, in bfloat16 on a GPU: Qwen3, or Qwen2."""
    theirs = AutoConfig.for_model(
        "qwen3" if config.qk_norm else "qwen2",
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.mlp_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.max_context_length, tie_word_embeddings=config.tie_embeddings,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(theirs, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return model.eval()


def step_seconds(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int, repeats: int) -> list[float]:
    """Return the seconds of a decode step of this batch in each repeat."""
    # Without a GPU, the library does not measure how large its cache may be.
    on_gpu = model.device.type == "cuda"
    batching = ContinuousBatchingConfig() if on_gpu else ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256)
    params = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    seconds = []
    for repeat in range(repeats + 1):
        outputs = model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=params, continuous_batching_config=batching,
            record_timestamps=True, persistent_manager=True,
        )  # fmt: skip
        times = [output.timestamps for output in outputs.values()]
        if [len(each) for each in times] != [num_tokens] * len(prompts):
            raise ValueError(f"transformers returned {[len(each) for each in times]} tokens, not {num_tokens} each")
        if repeat:
            # Tokens of one step have nearly the same time, so each sequence's own times are taken.
            first, last = max(each[0] for each in times), min(each[-1] for each in times)
            inside = min(sum(first <= at <= last for at in each) for each in times)
            seconds.append((last - first) / (inside - 1))
    model.destroy_cached_continuous_batching_manager()
    return seconds


def main() -> int:
    """Measure the batch sizes, print a table and write JSON. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.inprocess.bench_transformers")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=SHAPE_SIZES, help="shape of the model")
    model.add_argument("--checkpoint", type=Path, metavar="DIR", help="checkpoint whose config is the shape")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON output file")
    options = {"batch": ([1, 16, 64], "batch sizes"), "context": (1024, "tokens of a sequence at the middle step")}
    add_options(parser, {**options, "steps": (32, "decode steps of a run"), "repeats": (5, "timed runs of a batch")})
    arguments = parser.parse_args()
    config = shape_config(arguments.shape) if arguments.shape else read_manifest(arguments.checkpoint).config
    device = "cuda" if torch.cuda.is_available() else "cpu"
    built, rng, rows = make_model(config, device), random.Random(0), []
    for batch in arguments.batch:
        length = arguments.context - arguments.steps // 2
        prompts = [random_prompt(rng, config.vocab_size, length) for _ in range(batch)]
        seconds = step_seconds(built, prompts, arguments.steps + 1, arguments.repeats)
        step_ms = spread(1e3 * each for each in seconds)
        rows.append({"batch_size": batch, "context_length": arguments.context, "step_ms": step_ms})
        save_result({"kind": "transformers", "device": device, "decode": rows}, arguments.out)
    print(table(_COLUMNS, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
