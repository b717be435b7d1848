"""Cohere (Command R) and Cohere 2 (Command R7B): parallel layers with one layer norm, rotation of neighbouring pairs.

Source of names and defaults: the classes `…Config` and `…ForCausalLM` of the transformers library.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from model.config_enums import NormKind
from model.huggingface.families.reading.family import Layout, Names
from model.huggingface.families.reading.layer_types import read_layer_types
from model.huggingface.families.reading.llama_like import QKV, derived_family, read_one_rope
from model.huggingface.families.reading.reader import ConfigReader

# Keys that the transformers library does not read, with the values of what it computes.
_COMPUTED = {
    "use_parallel_block": True,
    "use_gated_activation": True,
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "order_of_interleaved_layers": "local_attn_first",
}


def _read_cohere(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    reader.check_all({**_COMPUTED, "use_qk_norm": False}, "not implemented; use another checkpoint")
    return {
        "norm": NormKind.LAYER_NORM,
        "norm_eps": reader.number("layer_norm_eps", 1e-5),
        "norm_bias": False,
        "parallel_residual": True,
        "shares_norm": True,
        "logit_divisor": 1 / reader.number("logit_scale", 0.0625),
        "attention_bias": reader.flag("attention_bias", False),
    }


def _read_cohere2(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("layer_switch", "use_embedding_sharing", "use_parallel_embedding"):
        reader.value(key)
    period = reader.size("sliding_window_pattern", 4)
    window = reader.optional_size("sliding_window", 4096)
    layers = range(fields["num_layers"])
    windows = read_layer_types(reader, len(layers), window=window, slides=lambda layer: (layer + 1) % period != 0)
    # Layers without a window have no positions.
    return {
        **_read_cohere(reader, fields),
        **windows,
        "unrotated_layers": windows.get("global_layers", tuple(layers)),
    }


_SIZES: Mapping[str, Any] = {
    "renamed": {"layers.#.attention.qkv": Names(QKV, Layout.ROTARY_PAIRS)},
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
COHERE = (
    derived_family("cohere", "Cohere", _read_cohere, read_ropes=partial(read_one_rope, theta=500_000.0), **_SIZES),
    derived_family("cohere2", "Cohere2", _read_cohere2, **_SIZES),
)
