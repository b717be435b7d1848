"""Unusable checkpoints of mixtures of experts are rejected in one line that names the tensor or key."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint.manifest import read_manifest
from model.config_enums import MAX_EXPERTS
from model.huggingface.directory import SINGLE_FILE
from model.huggingface.family_table import read_family_config
from model.io.files import CheckpointError
from tests.families.models import CASES

EXPERT = "model.layers.2.mlp.experts.4.up_proj.weight"
FUSED = "model.layers.1.block_sparse_moe.input_linear.weight"
# Case, name of a tensor, its new value (None: it is removed), and the error.
DAMAGES: dict[str, tuple[str, str, torch.Tensor | None, str]] = {
    "expert missing": ("qwen3_moe", EXPERT, None, rf"tensor {EXPERT} is in no weight file \(1 missing\)"),
    "expert too many": (
        "qwen3_moe",
        EXPERT.replace("4", "6"),
        torch.ones(40, 32),
        r"experts.6.up_proj.weight is not part",
    ),
    "expert in a layer without": (
        "qwen3_moe sparse steps tied",
        EXPERT,
        torch.ones(40, 32),
        rf"tensor {EXPERT} is not part of the model",
    ),
    "expert misshapen": (
        "qwen3_moe",
        EXPERT,
        torch.ones(48, 32),
        rf"tensor {EXPERT} has shape \(48, 32\), but the config requires \(40, 32\); use",
    ),
    "router missing": (
        "mixtral",
        "model.layers.0.block_sparse_moe.gate.weight",
        None,
        "moe.gate.weight is in no weight",
    ),
    "fused experts missing": (
        "granitemoe",
        FUSED,
        None,
        r"moe.input_linear\[0\].weight is in no weight file \(6 missing",
    ),
    "fused expert missing": (
        "granitemoe",
        FUSED,
        torch.ones(5, 96, 32),
        f"tensor {FUSED} has 5 experts, but the config requires 6; use the config",
    ),
    "fused experts misshapen": (
        "granitemoe",
        FUSED,
        torch.ones(6, 90, 32),
        rf"tensor {FUSED} has shape \(90, 32\), but the config requires \(96, 32\)",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_experts_are_rejected(tmp_path: Path, name: str) -> None:
    case, tensor, value, message = DAMAGES[name]
    CASES[case].build().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    tensors.pop(tensor, None)
    save_file(tensors if value is None else {**tensors, tensor: value}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=message) as caught:
        _ = read_manifest(tmp_path).placements
    assert "\n" not in str(caught.value)


# Family, keys of config.json, and the error.
CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "two numbers of experts": (
        "qwen3_moe",
        {"num_experts": 8, "num_local_experts": 4},
        "num_local_experts=4: contradicts num_experts=8; remove the wrong key",
    ),
    "no expert": ("mixtral", {"num_local_experts": 0}, "num_local_experts must be a positive integer"),
    "more experts of a token than of a layer": (
        "mixtral",
        {"num_experts_per_tok": 9},
        "experts num_per_token must be at most 8",
    ),
    "more experts than are possible": (
        "olmoe",
        {"num_experts": MAX_EXPERTS},
        "1,600,000 experts, but at most 100,000 are supported; use a smaller model",
    ),
    "layers that the model lacks": (
        "qwen3_moe",
        {"mlp_only_layers": ["1"]},
        "mlp_only_layers=.*expected a list of layer",
    ),
    "clipped q, k and v": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0: not implemented; use a checkpoint without it"),
    "biases": ("granitemoe", {"mlp_bias": True}, "experts needs a gated mlp without biases"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_are_not_supported_are_rejected(name: str) -> None:
    model_type, values, message = CONFIGS[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        read_family_config(Path("config.json"), {"model_type": model_type, **values})
    assert "\n" not in str(caught.value)


def test_some_layers_of_a_mixture_have_no_experts() -> None:
    values = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    _, config = read_family_config(Path("config.json"), values)
    assert [layer for layer in range(6) if config.experts_of(layer) is not None] == [1, 5]
