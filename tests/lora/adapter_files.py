"""Random LoRA adapters in PEFT's format, and the same adapters merged into their base model, computed here by name.

    python -m tests.lora.adapter_files BASE OUT

writes a random adapter to OUT, to try adapters without training one. BASE: Hugging Face directory of the model.
"""

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TRANSPOSED = re.compile(r".*\.c_(attn|proj|fc)$")  # GPT-2's Conv1D; starcoder2's linear layers have other paths


def linear_modules(base: Path) -> dict[str, Tensor]:
    """Return the weights of the linear modules in a Hugging Face directory's layers, by the module's name."""
    weights = load_file(base / "model.safetensors")
    is_layer = re.compile(r".*\b(layers|h)\.\d+\..*")
    return {
        name.removesuffix(".weight"): weight
        for name, weight in weights.items()
        if weight.dim() == 2 and is_layer.match(name) and "embed" not in name
    }


def is_transposed(base: Path, module: str) -> bool:
    kind = json.loads((base / "config.json").read_text())["model_type"]
    return kind == "gpt2" and TRANSPOSED.match(module) is not None


def write_adapter(
    directory: Path,
    base: Path,
    targets: list[str] | str,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    dtype: torch.dtype = torch.float32,
    spread: float = 0.2,
    **config: Any,
) -> Path:
    """Write a random adapter for the modules that end with one of the names, or match the regular expression."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, weight in linear_modules(base).items():
        if isinstance(targets, str):
            is_target = targets == "all-linear" or re.fullmatch(targets, module) is not None
        else:
            is_target = any(module.endswith(f".{name}") for name in targets)
        layers = config.get("layers_to_transform")
        if not is_target or (layers is not None and int(re.findall(r"\.(\d+)\.", module)[0]) not in layers):
            continue
        inputs, outputs = weight.shape if is_transposed(base, module) else weight.shape[::-1]
        own = next(
            (r for key, r in config.get("rank_pattern", {}).items() if re.search(rf"(^|\.){key}$", module)), rank
        )
        for kind, shape in (("lora_A", (own, inputs)), ("lora_B", (outputs, own))):
            numbers = torch.empty(shape).normal_(0.0, spread, generator=generator).to(dtype)
            tensors[f"base_model.model.{module}.{kind}.weight"] = numbers
    assert tensors
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    values = {
        "peft_type": "LORA",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": targets,
        "bias": "none",
        "lora_dropout": 0.05,
        "task_type": "CAUSAL_LM",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_dora": False,
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return directory


def merge(base: Path, adapter: Path, out: Path) -> Path:
    """Write a copy of the base model with the adapter's additions in its weights."""
    shutil.copytree(base, out)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, tensors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a_RI in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b_FR = tensors[name.replace("lora_A", "lora_B")]
        patterns = config.get("alpha_pattern", {}).items()
        alpha = next((a for key, a in patterns if re.search(rf"(^|\.){key}$", module)), config["lora_alpha"])
        rank = len(a_RI)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        added = scale * b_FR.double() @ a_RI.double()
        added = added.t() if is_transposed(base, module) else added
        weights[f"{module}.weight"] = (weights[f"{module}.weight"].double() + added).float().contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


if __name__ == "__main__":
    _base, _out = map(Path, sys.argv[1:])
    # The scale of 2 and this spread change a small model's text, but not to noise.
    write_adapter(_out, _base, ["q_proj", "v_proj"], rank=8, alpha=16.0, spread=0.1)
    print(f"wrote {_out}: rank 8, q_proj and v_proj")
