"""Llama, and families that differ from Llama by flags: Mistral, Qwen2, Qwen3, ERNIE 4.5.

Source of names and defaults: the classes `…Config` and `…ForCausalLM` of the transformers library.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from model.config_enums import QkNormScope
from model.huggingface.families.reading.family import Layout, Names
from model.huggingface.families.reading.layer_types import read_layer_types
from model.huggingface.families.reading.llama_like import QKV, derived_family, read_one_rope
from model.huggingface.families.reading.reader import ConfigReader


def _read_upper_layer_windows(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return the sliding-window fields of ModelConfig for Qwen2 and Qwen3, whose upper layers may have a window."""
    window = reader.optional_size("sliding_window", 4096)
    if not reader.flag("use_sliding_window", False):
        window = None
    first = reader.value("max_window_layers")
    if first is None:
        first = 28
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        reader.reject("max_window_layers", first, "expected a number of layers, 0 or more; correct the config")
    return read_layer_types(reader, num_layers, window=window, slides=lambda layer: layer >= first)


def _read_llama(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: reader.flag(key, False) for key in ("attention_bias", "mlp_bias")}


def _read_mistral(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    window = reader.optional_size("sliding_window", 4096)
    return read_layer_types(reader, fields["num_layers"], window=window, slides=lambda _: True)


def _read_qwen2(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if not reader.flag("attention_bias", True):
        reader.reject("attention_bias", False, "Qwen2 has biases of q, k and v; correct the config")
    windows = _read_upper_layer_windows(reader, fields["num_layers"])
    return {"attention_bias": True, "attention_out_bias": False, **windows}


def _read_qwen3(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    bias, windows = reader.flag("attention_bias", False), _read_upper_layer_windows(reader, fields["num_layers"])
    return {"attention_bias": bias, "qk_norm": True, "qk_norm_scope": QkNormScope.HEAD, **windows}


def _read_ernie(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(("attention_bias", "mlp_bias"), reader.flag("use_bias", False))


_QWEN_SIZES: Mapping[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
# Mistral 7B (arXiv 2310.06825): a sliding window in every layer, unless `sliding_window` is null.
MISTRAL = derived_family(
    "mistral",
    "Mistral",
    _read_mistral,
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=4096 * 32,
)
LLAMA_LIKE = (
    # Llama 2 (arXiv 2307.09288) and 3 (arXiv 2407.21783): rotary embedding, RMS norm, SwiGLU, grouped-query attention.
    derived_family("llama", "Llama", _read_llama),
    MISTRAL,
    # Qwen2 (arXiv 2407.10671) and Qwen2.5: biases of q, k and v, and optional windows in the upper layers.
    derived_family("qwen2", "Qwen2", _read_qwen2, **_QWEN_SIZES),
    # Qwen3 (arXiv 2505.09388): q and k normalized per head before rotation, and an explicit head size.
    derived_family("qwen3", "Qwen3", _read_qwen3, **_QWEN_SIZES, head_dim=128),
    # ERNIE 4.5 (2025, dense): rows of q and k in rotary pairs. Its first files have class names with one more "_".
    replace(
        derived_family(
            "ernie4_5",
            "Ernie4_5",
            _read_ernie,
            renamed={"layers.#.attention.qkv": Names(QKV, Layout.ROTARY_PAIRS)},
            read_ropes=partial(read_one_rope, theta=500_000.0),
            vocab_size=103424,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=18,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        ),
        architectures=("Ernie4_5ForCausalLM", "Ernie4_5Model", "Ernie4_5_ForCausalLM", "Ernie4_5_Model"),
    ),
)
