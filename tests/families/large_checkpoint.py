"""Checkpoints of 300 MB, and a child process that measures the memory of loading one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from model.huggingface.families.reading.family import sources
from model.huggingface.family_table import read_family_config

ROOT = Path(__file__).parents[2]
MEGABYTE = 2**20
WIDTH, LAYERS, MLP = 1024, 4, 3072
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "intermediate_size": MLP,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "gpt2": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 16},
    "gpt_neox": {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 4 * WIDTH,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}
_LOAD = """
import sys
from pathlib import Path
import torch
from model.attention.backends import ATTENTION_BACKENDS
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest

def kilobytes(name):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":")]
    return int(line.split()[1])

manifest = read_manifest(sys.argv[1])
dtype = getattr(torch, sys.argv[2])
baseline = kilobytes("VmRSS")
model = load_model(manifest, device="cpu", dtype=dtype, attention=ATTENTION_BACKENDS["sdpa"])
print(manifest.num_weight_bytes, baseline * 1024, kilobytes("VmHWM") * 1024, kilobytes("VmRSS") * 1024)
"""


def write_large(directory: Path, family_name: str, dtype: torch.dtype, *, num_shards: int, num_bytes: int) -> None:
    """Write a random checkpoint whose weight files have about `num_bytes`, by the choice of the vocabulary size."""
    directory.mkdir()
    values = {"model_type": family_name, **CONFIGS[family_name], "vocab_size": 1}
    _, config = read_family_config(directory / "config.json", values)
    rows = (num_bytes // dtype.itemsize - config.num_parameters) // WIDTH
    values["vocab_size"] = rows
    (directory / "config.json").write_text(json.dumps(values))
    family, config = read_family_config(directory / "config.json", values)
    parts = [part for source in sources(config, family).values() for part in source.shapes.items()]
    generator = torch.Generator().manual_seed(0)
    names = [f"model-{n:05}-of-{num_shards:05}.safetensors" for n in range(1, num_shards + 1)]
    weight_map: dict[str, str] = {}
    for number, name in enumerate(names if num_shards > 1 else ["model.safetensors"]):
        mine = parts[number::num_shards]
        tensors = {part: torch.empty(shape).uniform_(-1, 1, generator=generator).to(dtype) for part, shape in mine}
        save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    if num_shards > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def measure(directory: Path, dtype: str) -> tuple[int, int, int, int]:
    """Load a model in a child process; return bytes of its files, and of the process before, at peak and after."""
    command = [sys.executable, "-W", "ignore", "-c", _LOAD, str(directory), dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    file_bytes, baseline, peak, after = (int(word) for word in done.stdout.split())
    return file_bytes, baseline, peak, after
