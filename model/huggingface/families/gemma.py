"""Gemma 1, 2 and 3: Llama's layers with GeGLU, norms of 1 + weight, and an embedding scaled by sqrt(hidden size).

Source of names and defaults: the classes `…Config` and `…ForCausalLM` of the transformers library.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from model.config import ModelConfig
from model.config_enums import MlpKind, NormPlacement, QkNormScope
from model.huggingface.families.family import convert_config, plain
from model.huggingface.families.llama_like import ACTIVATIONS, derived_family, read_layer_types
from model.huggingface.families.reader import DEFAULT_THETA, ConfigReader, read_rope

_TANH = {name: kind for name, kind in ACTIVATIONS.items() if kind is MlpKind.GEGLU}
_GLOBAL_THETA = 1_000_000.0
_ROPE_KEYS = ("full_attention", "sliding_attention")
_VISION_KEYS = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
_OUT_NORMS = {
    "layers.#.attention_out_norm": plain("layers.#.post_attention_layernorm"),
    "layers.#.mlp_norm": plain("layers.#.pre_feedforward_layernorm"),
    "layers.#.mlp_out_norm": plain("layers.#.post_feedforward_layernorm"),
}


def _read_gemma(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return _shared_fields(reader, fields, activation_keys=("hidden_act", "hidden_activation"))


def _shared_fields(
    reader: ConfigReader, fields: Mapping[str, Any], *, activation_keys: tuple[str, str]
) -> dict[str, Any]:
    """Return the fields of all versions. activation_keys: the key that was read, and the key that must agree."""
    read, other = activation_keys
    activation = reader.value(other)
    if activation is not None and ACTIVATIONS.get(str(activation)) is not fields["mlp"]:
        reader.reject(other, activation, f"{read} has another value; keep the correct one")
    return {
        "attention_bias": reader.flag("attention_bias", False),
        "norm_unit_offset": True,
        "embedding_scale": float(fields["hidden_size"]) ** 0.5,
    }


def _read_gemma2(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    reader.check_ignored("sliding_window_pattern", 2, "layer_types")
    return {
        **_newer_fields(reader, fields, period=2, logit_cap=30.0),
        "score_soft_cap": reader.optional_number("attn_logit_softcapping", 50.0),
    }


def _read_gemma3(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    period = reader.optional_size("sliding_window_pattern", 6)
    own = _newer_fields(reader, fields, period=period or 6, logit_cap=None)
    if "sliding_window" not in own:
        own["local_rope_theta"] = None
    return {**own, "qk_norm": True, "qk_norm_scope": QkNormScope.HEAD}


def _newer_fields(
    reader: ConfigReader, fields: Mapping[str, Any], *, period: int, logit_cap: float | None
) -> dict[str, Any]:
    """Return the fields of Gemma 2 and 3: one layer of `period` has no window, and `logit_cap` is a default."""
    size = reader.number("query_pre_attn_scalar", 256)
    windows = read_layer_types(
        reader,
        fields["num_layers"],
        window=reader.optional_size("sliding_window", 4096),
        slides=lambda layer: (layer + 1) % period != 0,
    )
    return {
        **_shared_fields(reader, fields, activation_keys=("hidden_activation", "hidden_act")),
        **windows,
        "norm_placement": NormPlacement.BOTH,
        "score_scale": None if size == fields["head_dim"] else size**-0.5,
        "logit_soft_cap": reader.optional_number("final_logit_softcapping", logit_cap),
    }


def _read_ropes(reader: ConfigReader, positions: int) -> dict[str, Any]:
    """Return the fields of Gemma 3's two rotary embeddings. Only that of the layers without a window may be scaled.

    Old files have rope_theta, rope_scaling and rope_local_base_freq; new files have rope_parameters by kind of layer.
    """
    given = reader.value("rope_parameters")
    by_kind = {} if given is None else given
    if not isinstance(by_kind, Mapping) or by_kind.keys() - set(_ROPE_KEYS):
        reader.reject("rope_parameters", given, f"expected an object with the keys {' and '.join(_ROPE_KEYS)}")
    old_keys: tuple[tuple[str, ...], ...] = (("rope_theta", "rope_scaling"), ("rope_local_base_freq",))
    ropes = []
    for kind, keys, theta in zip(_ROPE_KEYS, old_keys, (_GLOBAL_THETA, DEFAULT_THETA), strict=True):
        values = {key: reader.value(key) for key in keys} | {"rope_parameters": by_kind.get(kind)}
        inner = ConfigReader(reader.path, values, prefix=f"{kind} ")
        ropes.append(read_rope(inner, max_positions=positions, theta_names=keys[:1], theta=theta))
    full, local = ropes
    if local.scaling is not None:
        reader.reject("rope_parameters", given, "scaling in layers with a window is not implemented")
    return {"rope_theta": full.theta, "rope_scaling": full.scaling, "local_rope_theta": local.theta}


def _read_multimodal(reader: ConfigReader) -> ModelConfig:
    """Return the config of the language model in a config.json with a vision tower."""
    given = reader.value("text_config")
    text = {} if given is None else given
    if not isinstance(text, Mapping):
        reader.reject("text_config", given, "expected a JSON object; correct the config")
    for key in _VISION_KEYS:
        reader.value(key)
    shared = {"tie_word_embeddings": reader.flag("tie_word_embeddings", True)}
    inner = ConfigReader(reader.path, {**shared, **text}, prefix="text_config.")
    return convert_config(_GEMMA3_TEXT, inner)


_GEMMA2 = derived_family(
    "gemma2",
    "Gemma2",
    _read_gemma2,
    renamed=_OUT_NORMS,
    activations=_TANH,
    activation_key="hidden_activation",
    vocab_size=256000,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
_GEMMA3_TEXT = derived_family(
    "gemma3_text",
    "Gemma3",
    _read_gemma3,
    renamed=_OUT_NORMS,
    activations=_TANH,
    activation_key="hidden_activation",
    read_ropes=_read_ropes,
    vocab_size=262208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)
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
    _GEMMA2,
    # Gemma 3 (arXiv 2503.19786): q and k normed per head, a window in five of six layers with an own rotary base.
    _GEMMA3_TEXT,
    replace(
        _GEMMA3_TEXT,
        model_type="gemma3",
        architectures=("Gemma3ForConditionalGeneration", "Gemma3Model"),
        read_config=_read_multimodal,
        prefix="language_model.model.",
        other_prefixes=("model.language_model.",),
        aliases={"language_model.lm_head.weight": "lm_head.weight"},
        ignored_tensors=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
        left_out="the vision tower; only the language model is loaded, and images in requests are rejected",
    ),
)
