"""Benchmark of transformers' continuous batching on a GPU against the engine, in turn: one shape, random weights.

    python -m loadtest.gpu.peers --out FILE

A part of `loadtest/gpu/suite.sh` in its own module, because it needs transformers.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from loadtest.gpu.bench_gpu import full, tiny
from loadtest.gpu.bench_setting import Bench
from loadtest.gpu.measurements import large_engine, prompts, tokens_per_second
from loadtest.measurement.provenance import provenance, tell
from loadtest.measurement.spread import Spread

PROGRAM = "python -m loadtest.gpu.peers"
_ROUNDS = 2


def their_model(bench: Bench) -> Qwen2ForCausalLM:
    """Return transformers' implementation of the shape, with random weights."""
    shape = bench.shape
    config = Qwen2Config(
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_context_length,
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.mlp_size,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tie_embeddings,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
    )
    with torch.device(bench.device):
        model = Qwen2ForCausalLM(config)
        torch.nn.Module.to(model, bench.dtype)
        model.eval()
    return model


def their_tokens_per_second(model: Qwen2ForCausalLM, texts: list[list[int]], output: int) -> float:
    """Run all prompts through `generate_batch`, greedily, `output` tokens each, and return tokens per second.

    Raises:
        RuntimeError: a completion has fewer tokens.
    """
    settings = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    began = time.perf_counter()
    found = model.generate_batch(inputs=texts, generation_config=settings)
    elapsed = time.perf_counter() - began
    counts = [len(answer.generated_tokens) for answer in found.values()]
    if counts != [output] * len(texts):
        raise RuntimeError(f"expected {len(texts)} completions of {output} tokens, got lengths {counts}")
    return sum(counts) / elapsed


def compare(bench: Bench) -> dict[str, Any]:
    """Measure both in turn. The first round is a warm-up."""
    engine, model = large_engine(bench), their_model(bench)
    ours, theirs = [], []
    for number in range(_ROUNDS + 1):
        texts = prompts(bench, bench.streams, seed=number)
        ours.append(tokens_per_second(engine, texts, bench.output, prefix=str(number)))
        theirs.append(their_tokens_per_second(model, texts, bench.output))
    return {
        "streams": bench.streams,
        "prompt": bench.prompt,
        "output": bench.output,
        "tokens_per_second": Spread(tuple(ours[1:])).to_dict(),
        "transformers_tokens_per_second": Spread(tuple(theirs[1:])).to_dict(),
        "ratio": Spread.of_ratios(ours[1:], theirs[1:]).to_dict(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return 0, also without a device, which the JSON reports."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Compare transformers with Kvasir's engine on a GPU.")
    parser.add_argument("--out", type=Path, help="JSON output file (default: standard output)")
    parser.add_argument("--tiny", action="store_true", help="small sizes on any device, for tests")
    parsed = parser.parse_args(given)
    has_gpu = torch.cuda.is_available()
    result: dict[str, Any] = provenance(PROGRAM, given)
    if not has_gpu and not parsed.tiny:
        tell(result | {"absent": "no CUDA device"}, parsed.out)
        return 0
    device = torch.device("cuda" if has_gpu else "cpu")
    tell(result | compare(tiny(device) if parsed.tiny else full(device)), parsed.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
