"""Benchmarks of a GPU, a part at a time, as run by `loadtest/gpu/suite.sh`.

    python -m loadtest.gpu.bench_gpu PART --out FILE [--checkpoint DIR]

Parts: card (the device, its limits, and the available attention kernels), attention (kernels), decode (steps of a
random model of 1.5 billion parameters against memory bandwidth), engine (the default model as it is served), and
quantized (decode steps with int8 and fp8 weights).

Without a CUDA device a part is reported as absent.
`--tiny` runs the same code with small sizes on any device, for tests.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from loadtest.gpu.bench_setting import Bench
from loadtest.gpu.measurements import attention, card, decode, quantized, tokens_per_second
from loadtest.inprocess.engine import InProcess
from loadtest.measurement.provenance import provenance, tell
from model.config import ModelConfig
from service.config.settings import ModelSettings

PROGRAM = "python -m loadtest.gpu.bench_gpu"
_ROUNDS = 3
# Shape of Qwen2 with 1.5 billion parameters (its config.json).
_QWEN2: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "max_context_length": 32_768,
    "num_layers": 28,
    "hidden_size": 1536,
    "num_heads": 12,
    "num_kv_heads": 2,
    "head_dim": 128,
    "mlp_size": 8960,
    "position": "rotary",
    "rope_theta": 1_000_000.0,
    "norm": "rms_norm",
    "norm_eps": 1e-6,
    "mlp": "swiglu",
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "tie_embeddings": True,
}
_TINY = {"vocab_size": 300, "max_context_length": 64, "num_layers": 2, "hidden_size": 64, "mlp_size": 96} | {
    "num_heads": 4,
    "head_dim": 16,
}


def full(device: torch.device) -> Bench:
    """Return the sizes for a GPU."""
    return Bench(
        device=device,
        dtype=torch.bfloat16,
        shape=ModelConfig.from_dict(dict(_QWEN2)),
        batches=(1, 2, 4, 8, 16, 32, 64),
        context=1024,
        attention=((12, 2, 128), (32, 8, 128), (6, 6, 64)),
        attention_contexts=(1024, 8192),
        probe_bytes=4 * 2**30,
        probe_side=8192,
        prompt=896,
        output=128,
        streams=64,
    )


def tiny(device: torch.device) -> Bench:
    """Return small sizes that take a second on a CPU."""
    return Bench(
        device=device,
        dtype=torch.float32,
        shape=ModelConfig.from_dict({**_QWEN2, **_TINY}),
        batches=(1, 5),
        context=40,
        attention=((4, 2, 16),),
        attention_contexts=(40,),
        probe_bytes=2**20,
        probe_side=64,
        prompt=12,
        output=4,
        streams=3,
        repeats=2,
    )


def engine(bench: Bench, checkpoint: Path) -> dict[str, Any]:
    """Measure a checkpoint as the service runs it: tokens/s over the number of streams."""
    built = InProcess.open(ModelSettings(checkpoint=checkpoint, max_num_running=256, max_batched_tokens=2048))
    built.engine.warm_up()
    rows = []
    for streams in (1, 16, 64, 256) if bench.streams > 3 else (1, 3):
        texts = [[(7 * number + place) % 250 for place in range(32)] for number in range(streams)]
        values = [
            tokens_per_second(built.engine, texts, 4 * bench.output, prefix=f"{streams}-{number}")
            for number in range(_ROUNDS)
        ]
        rows.append({"streams": streams, "tokens_per_second": statistics.median(values), "values": values})
    return {"model": built.facts, "engine": str(built.built), "rows": rows}


PARTS: Mapping[str, Callable[[Bench, Path], dict[str, Any]]] = {
    "card": lambda bench, checkpoint: card(bench),
    "attention": lambda bench, checkpoint: attention(bench),
    "decode": lambda bench, checkpoint: decode(bench),
    "engine": engine,
    "quantized": lambda bench, checkpoint: quantized(bench),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a part and write JSON. Return 0, also without a device, which the JSON reports."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Measure one part of the GPU benchmarks.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, help="JSON output file (default: standard output)")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("checkpoints/kvasir-9m"), help="checkpoint of the part `engine`"
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes on any device, for tests")
    parsed = parser.parse_args(given)
    has_gpu = torch.cuda.is_available()
    result: dict[str, Any] = provenance(PROGRAM, given)
    if not has_gpu and not parsed.tiny:
        tell(result | {"absent": "no CUDA device"}, parsed.out)
        return 0
    device = torch.device("cuda" if has_gpu else "cpu")
    bench = tiny(device) if parsed.tiny else full(device)
    tell(result | PARTS[parsed.part](bench, parsed.checkpoint), parsed.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
