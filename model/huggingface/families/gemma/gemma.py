"""Gemma 1 and 2: Llama's layers with GeGLU, norms of 1 + weight, and an embedding scaled by sqrt(hidden size).

Source of names and defaults: the classes `…Config` and `…ForCausalLM` of the transformers library.
"""

from collections.abc import Mapping
from typing import Any

from model.config_enums import MlpKind, NormPlacement
from model.huggingface.families.reading.family import plain
from model.huggingface.families.reading.layer_types import read_layer_types
from model.huggingface.families.reading.llama_like import ACTIVATIONS, derived_family
from model.huggingface.families.reading.reader import ConfigReader

TANH_ACTIVATIONS = {name: kind for name, kind in ACTIVATIONS.items() if kind is MlpKind.GEGLU}
OUT_NORMS = {
    "layers.#.attention_out_norm": plain("layers.#.post_attention_layernorm"),
    "layers.#.mlp_norm": plain("layers.#.pre_feedforward_layernorm"),
    "layers.#.mlp_out_norm": plain("layers.#.post_feedforward_layernorm"),
}


def _read_gemma(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return shared_fields(reader, fields, activation_keys=("hidden_act", "hidden_activation"))


def shared_fields(
    reader: ConfigReader, fields: Mapping[str, Any], *, activation_keys: tuple[str, str]
) -> dict[str, Any]:
    """Return the ModelConfig fields that all versions of Gemma have in common.

    activation_keys: the key that sets the activation, and a second key, rejected if it sets another activation.
    """
    read, other = activation_keys
    activation = reader.value(other)
    if activation is not None and ACTIVATIONS.get(str(activation)) is not fields["mlp"]:
        reader.reject(other, activation, f"contradicts {read} or its default; remove the wrong key")
    return {
        "attention_bias": reader.flag("attention_bias", False),
        "norm_unit_offset": True,
        "embedding_scale": float(fields["hidden_size"]) ** 0.5,
    }


def _read_gemma2(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    reader.check_ignored("sliding_window_pattern", 2, "layer_types")
    own = newer_fields(reader, fields, period=2, logit_cap=30.0)
    reader.check_ignored("sliding_window_size", own.get("sliding_window", 4096), "sliding_window")  # in the first files
    return {**own, "score_soft_cap": reader.optional_number("attn_logit_softcapping", 50.0)}


def newer_fields(
    reader: ConfigReader, fields: Mapping[str, Any], *, period: int, logit_cap: float | None
) -> dict[str, Any]:
    """Return the ModelConfig fields that Gemma 2 and 3 have in common, including those of `shared_fields`.

    period: every `period`-th layer has no sliding window, if the config has no `layer_types`.
    logit_cap: default of `final_logit_softcapping`.
    """
    size = reader.number("query_pre_attn_scalar", 256)
    windows = read_layer_types(
        reader,
        fields["num_layers"],
        window=reader.optional_size("sliding_window", 4096),
        slides=lambda layer: (layer + 1) % period != 0,
    )
    return {
        **shared_fields(reader, fields, activation_keys=("hidden_activation", "hidden_act")),
        **windows,
        "norm_placement": NormPlacement.BOTH,
        "score_scale": None if size == fields["head_dim"] else size**-0.5,
        "logit_soft_cap": reader.optional_number("final_logit_softcapping", logit_cap),
    }


GEMMA2_SIZES: Mapping[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
GEMMA = (
    # Gemma 1 (arXiv 2403.08295): a scaled embedding, GeGLU, norms of 1 + weight, and an explicit head size.
    derived_family(
        "gemma",
        "Gemma",
        _read_gemma,
        # Released configs have "gelu" but mean the tanh approximation; the transformers library corrects this too.
        activations={"gelu_pytorch_tanh": MlpKind.GEGLU, "gelu": MlpKind.GEGLU, **ACTIVATIONS},
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
    # Gemma 2 (arXiv 2408.00118): soft caps of scores and logits, norms on both sides, a window in every second layer.
    derived_family(
        "gemma2",
        "Gemma2",
        _read_gemma2,
        renamed=OUT_NORMS,
        activations=TANH_ACTIVATIONS,
        activation_key="hidden_activation",
        **GEMMA2_SIZES,
    ),
)
