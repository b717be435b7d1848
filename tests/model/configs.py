"""Small model configs, one for each branch of the architecture."""

from typing import Any, cast

import torch

from model.config import ModelConfig
from model.nn.transformer import Attention, Block, Transformer
from tests.model.kernel_libraries import BACKENDS

ROTARY: dict[str, Any] = {
    "vocab_size": 300,
    "max_context_length": 64,
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_size": 48,
    "position": "rotary",
    "rope_theta": 10000.0,
    "norm": "rms_norm",
    "norm_eps": 1e-5,
    "mlp": "swiglu",
    "attention_bias": False,
    "mlp_bias": False,
    "qk_norm": True,
    "tie_embeddings": True,
}
GPT2 = {
    "position": "learned",
    "norm": "layer_norm",
    "mlp": "gelu",
    "num_kv_heads": 4,
    "attention_bias": True,
    "mlp_bias": True,
    "qk_norm": False,
    "tie_embeddings": False,
}
MULTI_HEAD = {"num_kv_heads": 4, "qk_norm": False}
NEOX = {"parallel_residual": True, "norm": "layer_norm", "mlp": "gelu_exact", "mlp_bias": True, "attention_bias": True}
RELATIVE = {"position": "relative_bias", "num_relative_buckets": 8, "max_relative_distance": 24}
DISENTANGLED = {"position": "disentangled", "max_relative_distance": 9, "qk_norm": False}
GEMMA = {"mlp": "geglu", "norm_unit_offset": True, "embedding_scale": 32**0.5, "norm_placement": "both"}
LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_context_length": 24,
}
YARN = {"kind": "yarn", "factor": 4.0, "original_context_length": 16, "beta_fast": 2.0, "beta_slow": 0.1}
LONGROPE = {
    "kind": "longrope",
    "factor": 4.0,
    "original_context_length": 16,
    "short_divisors": [1.0, 1.0, 1.0],
    "long_divisors": [1.1, 2.0, 7.0],
}
EXPERTS = {"num": 6, "num_per_token": 2, "mlp_size": 40, "normalizes": True, "dense_layers": [1]}
_CHANGES: dict[str, dict[str, Any]] = {
    "rotary-gqa": {},
    "rotary-mqa-untied": {"num_kv_heads": 1, "tie_embeddings": False, "qk_norm": False},
    "rotary-mha-wide-heads": {"num_kv_heads": 4, "head_dim": 16},
    "rotary-single-head": {"num_heads": 1, "num_kv_heads": 1, "head_dim": 32},
    "rotary-partial": {"rotary_dim": 4},
    "rotary-linear": {"rope_scaling": {"kind": "linear", "factor": 4.0}},
    "rotary-llama3": {"rope_scaling": LLAMA3},
    "gpt2": GPT2,
    "gpt2-no-bias": {
        **GPT2,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "mlp": "relu",
        "position_offset": 2,
    },
    "average": {"position": "learned", "attention": "average", "qk_norm": False},
    "none": {"position": "none"},
    "sinusoidal": {"position": "sinusoidal", "embedding_scale": 32**0.5},
    "relative-bias": RELATIVE,
    "relative-bias-window": {**RELATIVE, **MULTI_HEAD, "sliding_window": 6},
    "alibi": {"position": "alibi", "embedding_norm": True},
    "alibi-six-heads": {"position": "alibi", "num_heads": 6, "num_kv_heads": 3, "hidden_size": 48},
    "disentangled": {**DISENTANGLED, "num_kv_heads": 4},
    "disentangled-gqa": DISENTANGLED,
    "window-one-layer": {"sliding_window": 7, "global_layers": [1]},
    "window-average": {"position": "none", "attention": "average", "qk_norm": False, "sliding_window": 3},
    "falcon": {**NEOX, "num_kv_heads": 1, "shares_norm": True, "qk_norm": False, "mlp_bias": False},
    "neox": {**NEOX, **MULTI_HEAD, "rotary_dim": 2, "tie_embeddings": False},
    "gemma": {"mlp": "geglu", "norm_unit_offset": True, "embedding_scale": 32**0.5, "qk_norm": False},
    "gemma2": {
        **GEMMA,
        "score_scale": 0.2,
        "score_soft_cap": 2.0,
        "logit_soft_cap": 3.0,
        "sliding_window": 7,
        "global_layers": [1],
        "qk_norm": False,
    },
    "gemma3": {
        **GEMMA,
        "rope_theta": 1e6,
        "local_rope_theta": 500.0,
        "rope_scaling": {"kind": "linear", "factor": 8.0},
        "sliding_window": 7,
        "global_layers": [1],
        "head_dim": 16,
    },
    "gemma4": {
        **GEMMA,
        "norm_unit_offset": False,
        "num_layers": 4,
        "rope_theta": 1e6,
        "rope_scaling": {"kind": "proportional", "factor": 1.0, "rotated_fraction": 0.25},
        "local_rope_theta": 500.0,
        "sliding_window": 7,
        "global_layers": [1, 3],
        "global_head_dim": 16,
        "score_scale": 0.2,
        "logit_soft_cap": 3.0,
        "value_norm": True,
        "num_kv_shared_layers": 2,
        "kv_shared_mlp_size": 96,
        "layer_input_size": 8,
        "has_layer_scalar": True,
    },
    "olmo2": {"norm_placement": "post", "qk_norm_scope": "projection"},
    "hunyuan": {"qk_norm_after_rotation": True},
    "ministral3": {"rope_scaling": YARN, "score_growth": 0.5, "score_growth_interval": 5, "qk_norm": False},
    "cohere": {**NEOX, "shares_norm": True, "norm_bias": False, "qk_norm": False, "mlp": "swiglu"},
    "smollm3": {"unrotated_layers": [1], "qk_norm": False},
    "experts": {"experts": EXPERTS, "qk_norm": False},
    "phi3": {"rope_scaling": LONGROPE, "rotary_dim": 6, "qk_norm": False},
    "granite": {"logit_divisor": 6.0, "embedding_scale": 54.5, "score_scale": 0.2, "qk_norm": False},
    "qwen2": {"attention_bias": True, "attention_out_bias": False, "qk_norm": False, "score_scale": 0.2},
}
# All mechanisms at a small size.
VARIANTS: dict[str, ModelConfig] = {
    name: ModelConfig.from_dict({**ROTARY, **change}) for name, change in _CHANGES.items()
}


def build(config: ModelConfig, attention: str = "sdpa", seed: int = 1) -> Transformer:
    """Return a random model with random biases and norms, so that a missing bias or norm shows."""
    model = Transformer(config, BACKENDS[attention])
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator))
    return model.eval().requires_grad_(False)


def attention_layers(model: Transformer) -> list[Attention]:
    """Return the attention module of each layer, with its type, which `nn.ModuleList` does not keep."""
    return [cast(Block, layer).attention for layer in model.layers]
