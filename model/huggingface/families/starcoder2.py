"""StarCoder2 (arXiv 2402.19173): Llama's layers with layer norms, an MLP without a gate, biases and a window."""

from collections.abc import Mapping
from typing import Any

from model.config_enums import MlpKind, NormKind
from model.huggingface.families.reading.family import plain
from model.huggingface.families.reading.llama_like import derived_family
from model.huggingface.families.reading.reader import ConfigReader


def _read_own_fields(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    has_bias = reader.flag("use_bias", True)
    reader.choice("mlp_type", "default", {"default": None})  # a key of the first files
    return {
        "norm": reader.choice("norm_type", "layer_norm", {"layer_norm": NormKind.LAYER_NORM}),  # likewise
        "norm_eps": reader.number("norm_epsilon", 1e-5),
        "attention_bias": has_bias,
        "mlp_bias": has_bias,
        "sliding_window": reader.optional_size("sliding_window", None),
    }


STARCODER2 = derived_family(
    "starcoder2",
    "Starcoder2",
    _read_own_fields,
    renamed={
        "layers.#.mlp.up": plain("layers.#.mlp.c_fc"),
        "layers.#.mlp.down": plain("layers.#.mlp.c_proj"),
    },
    activations={
        **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), MlpKind.GELU),
        "gelu": MlpKind.GELU_EXACT,
    },
    vocab_size=49152,
    hidden_size=3072,
    intermediate_size=12288,
    num_hidden_layers=30,
    num_attention_heads=24,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
