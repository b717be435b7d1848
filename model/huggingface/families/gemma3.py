"""Gemma 3: models of text alone, and the language model of those with a vision tower. The tower is not served.

Source of names and defaults: the classes `…Config` and `…ForCausalLM` of the transformers library.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from model.config import ModelConfig
from model.config_enums import QkNormScope
from model.huggingface.families.family import ModelFamily, convert_config
from model.huggingface.families.gemma import GEMMA2_SIZES, OUT_NORMS, TANH_ACTIVATIONS, newer_fields
from model.huggingface.families.llama_like import derived_family
from model.huggingface.families.reader import DEFAULT_THETA, ConfigReader, read_rope

_GLOBAL_THETA = 1_000_000.0
_ROPE_KEYS = ("full_attention", "sliding_attention")
_VISION_KEYS = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")


def _read_gemma3(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    period = reader.optional_size("sliding_window_pattern", 6)
    own = newer_fields(reader, fields, period=period or 6, logit_cap=None)
    if "sliding_window" not in own:
        own["local_rope_theta"] = None
    return {**own, "qk_norm": True, "qk_norm_scope": QkNormScope.HEAD}


def read_ropes_by_kind(
    reader: ConfigReader, positions: int, head_dim: int, *, absent: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the ModelConfig fields of Gemma 3's two rotary embeddings: of layers without and with a window.

    absent: value of an absent `rope_parameters`.

    Raises CheckpointError for a scaling in layers with a window, or if old and new keys set different values.

    Old files have rope_theta, rope_scaling and rope_local_base_freq; new files have rope_parameters by kind of layer.
    """
    given = reader.value("rope_parameters")
    by_kind = (absent or {}) if given is None else given
    if not isinstance(by_kind, Mapping) or by_kind.keys() - set(_ROPE_KEYS):
        remedy = f"expected an object with the keys {' and '.join(_ROPE_KEYS)}; correct the config"
        reader.reject("rope_parameters", given, remedy)
    old_keys: tuple[tuple[str, ...], ...] = (("rope_theta", "rope_scaling"), ("rope_local_base_freq",))
    ropes = []
    for kind, keys, theta in zip(_ROPE_KEYS, old_keys, (_GLOBAL_THETA, DEFAULT_THETA), strict=True):
        values = {key: reader.value(key) for key in keys} | {"rope_parameters": by_kind.get(kind)}
        inner = ConfigReader(reader.path, values, prefix=f"{kind} ")
        ropes.append(read_rope(inner, max_positions=positions, theta_names=keys[:1], theta=theta))
    full, local = ropes
    if local.scaling is not None:
        reader.reject("rope_parameters", given, "scaling in layers with a window is not implemented; use another model")
    return {"rope_theta": full.theta, "rope_scaling": full.scaling, "local_rope_theta": local.theta}


def read_text_config(reader: ConfigReader, *, text: ModelFamily, tower_keys: Iterable[str]) -> ModelConfig:
    """Return the ModelConfig of the language model, `text_config` in a config.json with a vision or audio tower.

    text: family of the language model. tower_keys: keys about the towers, which are not served.
    """
    given = reader.value("text_config")
    values = {} if given is None else given
    if not isinstance(values, Mapping):
        reader.reject("text_config", given, "expected a JSON object; correct the config")
    for key in tower_keys:
        reader.value(key)
    tied = reader.flag("tie_word_embeddings", True)
    inner = ConfigReader(reader.path, {"tie_word_embeddings": tied, **values}, prefix="text_config.")
    config = convert_config(text, inner)
    if config.tie_embeddings != tied:
        reader.reject("tie_word_embeddings", tied, "contradicts text_config; remove the wrong key")
    return config


# Gemma 3 (arXiv 2503.19786): q and k normed per head, and five of six layers with a window and their own rotary base.
_GEMMA3_TEXT = replace(
    derived_family(
        "gemma3_text",
        "Gemma3Text",
        _read_gemma3,
        renamed=OUT_NORMS,
        activations=TANH_ACTIVATIONS,
        activation_key="hidden_activation",
        read_ropes=read_ropes_by_kind,
        **{**GEMMA2_SIZES, "vocab_size": 262208, "max_position_embeddings": 131072},
    ),
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
)
GEMMA3 = (
    _GEMMA3_TEXT,
    replace(
        _GEMMA3_TEXT,
        model_type="gemma3",
        architectures=("Gemma3ForConditionalGeneration", "Gemma3Model"),
        read_config=partial(read_text_config, text=_GEMMA3_TEXT, tower_keys=_VISION_KEYS),
        prefix="language_model.model.",
        other_prefixes=("model.language_model.",),
        aliases={"language_model.lm_head.weight": "lm_head.weight"},
        ignored_tensors=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
        left_out="the vision tower; only the language model is loaded, and images in requests are rejected",
    ),
)
