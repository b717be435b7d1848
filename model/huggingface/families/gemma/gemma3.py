"""Gemma 3: models of text alone, and the language model of those with a vision tower. The tower is not served.

Source of names and defaults: the classes `…Config` and `…ForCausalLM` of the transformers library.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from model.config import ModelConfig
from model.config_enums import QkNormScope
from model.huggingface.families.gemma.gemma import GEMMA2_SIZES, OUT_NORMS, TANH_ACTIVATIONS, newer_fields
from model.huggingface.families.reading.family import ModelFamily, convert_config
from model.huggingface.families.reading.layer_types import read_two_ropes
from model.huggingface.families.reading.llama_like import derived_family
from model.huggingface.families.reading.reader import DEFAULT_THETA, ConfigReader

_VISION_KEYS = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")


def _read_gemma3(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    period = reader.optional_size("sliding_window_pattern", 6)
    own = newer_fields(reader, fields, period=period or 6, logit_cap=None)
    if "sliding_window" not in own:
        own["local_rope_theta"] = None
    return {**own, "qk_norm": True, "qk_norm_scope": QkNormScope.HEAD}


read_gemma_ropes = partial(
    read_two_ropes,
    old_keys=(("rope_theta", "rope_scaling"), ("rope_local_base_freq",)),
    thetas=(1_000_000.0, DEFAULT_THETA),
)


def read_text_config(
    reader: ConfigReader, *, texts: tuple[ModelFamily, ...], tower_keys: Iterable[str], is_tied: bool
) -> ModelConfig:
    """Return the ModelConfig of the language model, `text_config` in a config.json with a vision or audio tower.

    Raises CheckpointError for an unsupported key or value, or if the language model has another value of
    `tie_word_embeddings` than the whole model.

    Args:
        texts: possible families of the language model, the default first.
        tower_keys: keys about the towers, which are not served.
        is_tied: default of `tie_word_embeddings`.
    """
    given = reader.value("text_config")
    values = {} if given is None else given
    if not isinstance(values, Mapping):
        reader.reject("text_config", given, "this key must have a JSON object; correct the config")
    for key in tower_keys:
        reader.value(key)
    tied = reader.flag("tie_word_embeddings", is_tied)
    inner = ConfigReader(reader.path, {"tie_word_embeddings": tied, **values}, prefix="text_config.")
    text = inner.choice("model_type", texts[0].model_type, {text.model_type: text for text in texts})
    config = convert_config(text, inner)
    if config.tie_embeddings != tied:
        reader.reject("tie_word_embeddings", tied, "contradicts text_config; remove the wrong key")
    return config


def with_vision_tower(
    texts: tuple[ModelFamily, ...], model_type: str, class_prefix: str, *, tower_keys: tuple[str, ...], is_tied: bool
) -> ModelFamily:
    """Return the family of models with a vision tower, of which only the language model is served.

    texts, tower_keys, is_tied: see `read_text_config`. class_prefix: beginning of the names of `transformers` classes.
    """
    return replace(
        texts[0],
        model_type=model_type,
        architectures=(f"{class_prefix}ForConditionalGeneration", f"{class_prefix}Model"),
        read_config=partial(read_text_config, texts=texts, tower_keys=tower_keys, is_tied=is_tied),
        prefix="language_model.model.",
        other_prefixes=("model.language_model.",),
        aliases={"language_model.lm_head.weight": "lm_head.weight"},
        ignored_tensors=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
        left_out="the vision tower; only the language model is loaded, and images in requests are rejected",
    )


# Gemma 3 (arXiv 2503.19786): q and k normed per head, and five of six layers with a window and their own rotary base.
_GEMMA3_TEXT = replace(
    derived_family(
        "gemma3_text",
        "Gemma3Text",
        _read_gemma3,
        renamed=OUT_NORMS,
        activations=TANH_ACTIVATIONS,
        activation_key="hidden_activation",
        read_ropes=read_gemma_ropes,
        **{**GEMMA2_SIZES, "vocab_size": 262208, "max_position_embeddings": 131072},
    ),
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
)
GEMMA3 = (
    _GEMMA3_TEXT,
    with_vision_tower((_GEMMA3_TEXT,), "gemma3", "Gemma3", tower_keys=_VISION_KEYS, is_tied=True),
)
