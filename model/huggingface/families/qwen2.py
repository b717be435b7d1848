"""Qwen2 (arXiv 2407.10671) and Qwen2.5: Llama with biases of q, k and v, and optional windows in its upper layers.

Source of names and defaults: `Qwen2Config` and `Qwen2ForCausalLM` of the transformers library.
"""

from collections.abc import Mapping
from typing import Any

from model.huggingface.families.llama_like import Defaults, llama_like_family, read_upper_layer_windows
from model.huggingface.families.reader import ConfigReader


def _read_own_fields(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if not reader.flag("attention_bias", True):
        reader.refuse("attention_bias", False, "Qwen2 has biases of q, k and v; correct the config")
    return {
        "attention_bias": True,
        "attention_out_bias": False,
        **read_upper_layer_windows(reader, fields["num_layers"]),
    }


QWEN2 = llama_like_family(
    "qwen2",
    "Qwen2",
    Defaults(vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768),
    _read_own_fields,
)
