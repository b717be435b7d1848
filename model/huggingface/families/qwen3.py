"""Qwen3 (arXiv 2505.09388): Llama with q and k normalized per head before rotation, and an explicit head size.

Source of names and defaults: `Qwen3Config` and `Qwen3ForCausalLM` of the transformers library.
"""

from collections.abc import Mapping
from typing import Any

from model.config_enums import QkNormScope
from model.huggingface.families.llama_like import Defaults, llama_like_family, read_upper_layer_windows
from model.huggingface.families.reader import ConfigReader


def _read_own_fields(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": reader.flag("attention_bias", False),
        "qk_norm": True,
        "qk_norm_scope": QkNormScope.HEAD,
        **read_upper_layer_windows(reader, fields["num_layers"]),
    }


QWEN3 = llama_like_family(
    "qwen3",
    "Qwen3",
    Defaults(
        vocab_size=151936,
        intermediate_size=22016,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=32768,
    ),
    _read_own_fields,
)
