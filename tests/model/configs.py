"""Small model configs, one for each branch of the architecture."""

from typing import Any

import torch

from model.attention.interface import ATTENTION_BACKENDS
from model.config import ModelConfig
from model.transformer import Transformer

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
VARIANTS: dict[str, ModelConfig] = {
    "rotary-gqa": ModelConfig.from_dict(ROTARY),
    "rotary-mqa-untied": ModelConfig.from_dict(
        {**ROTARY, "num_kv_heads": 1, "tie_embeddings": False, "qk_norm": False}
    ),
    "rotary-mha-wide-heads": ModelConfig.from_dict({**ROTARY, "num_kv_heads": 4, "head_dim": 16}),
    "gpt2": ModelConfig.from_dict({**ROTARY, **GPT2}),
}


def build(config: ModelConfig, attention: str = "sdpa", seed: int = 1) -> Transformer:
    """A random model whose biases and norms are random too, so that a dropped one shows."""
    model = Transformer(config, ATTENTION_BACKENDS[attention])
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator))
    return model.eval().requires_grad_(False)
