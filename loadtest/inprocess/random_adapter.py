"""Writer of a random LoRA adapter in PEFT's format, to try adapters without training one.

python -m loadtest.inprocess.random_adapter DIR OUT [RANK]

DIR is the model's Hugging Face directory, and OUT the directory to write. The adapter, of rank RANK (default: 8),
changes the queries and values of every layer, as PEFT's adapters do by default.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from model.checkpoint.lora_adapter import CONFIG_FILE, WEIGHTS_FILE
from model.checkpoint.manifest import read_manifest

TARGETS = ("q_proj", "v_proj")
# Deviation of the random numbers. The scale of 2 and this deviation change a small model's text, but not to noise.
_DEVIATION = 0.1


def write_random_adapter(base: Path, out: Path, *, rank: int, seed: int = 0) -> str:
    """Write a random adapter for the model in the directory `base`, and return a description of the adapter."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    headers = (header for place in read_manifest(base).placements.values() for header in place.parts)
    for header in headers:
        module = header.name.removesuffix(".weight")
        if module.endswith(TARGETS):
            for kind, shape in (("A", (rank, header.shape[1])), ("B", (header.shape[0], rank))):
                numbers = torch.empty(shape).normal_(0.0, _DEVIATION, generator=generator)
                tensors[f"base_model.model.{module}.lora_{kind}.weight"] = numbers
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": TARGETS, "bias": "none"}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / WEIGHTS_FILE)
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    return f"rank {rank}, {' and '.join(TARGETS)}, {len(tensors) // 2} matrices"


if __name__ == "__main__":
    directory, written, *more = sys.argv[1:]
    print(f"wrote {written}: {write_random_adapter(Path(directory), Path(written), rank=int(more[0]) if more else 8)}")
