"""Gemma 1 (arXiv 2403.08295): Llama with a scaled embedding, GeGLU, norms of 1 + weight, and an explicit head size.

Source of names and defaults: `GemmaConfig` and `GemmaForCausalLM` of the transformers library.
"""

from collections.abc import Mapping
from typing import Any

from model.config_enums import MlpKind
from model.huggingface.families.llama_like import GATED_ACTIVATIONS, Defaults, llama_like_family
from model.huggingface.families.reader import ConfigReader

# Released configs have "gelu" but mean the tanh approximation. The transformers library corrects this, and so does this
# table. Some configs also have hidden_activation, which is null or the tanh approximation.
_ACTIVATIONS = {"gelu_pytorch_tanh": MlpKind.GEGLU, "gelu": MlpKind.GEGLU, **GATED_ACTIVATIONS}


def _read_own_fields(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    other = reader.take("hidden_activation")
    if other is not None and (other != "gelu_pytorch_tanh" or fields["mlp"] is not MlpKind.GEGLU):
        reader.refuse("hidden_activation", other, "hidden_act has another value; keep the correct one")
    return {
        "attention_bias": reader.flag("attention_bias", False),
        "norm_unit_offset": True,
        "embedding_scale": float(fields["hidden_size"]) ** 0.5,
    }


GEMMA = llama_like_family(
    "gemma",
    "Gemma",
    Defaults(
        vocab_size=256000,
        hidden_size=3072,
        intermediate_size=24576,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=256,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    _read_own_fields,
    activations=_ACTIVATIONS,
)
