"""Ministral 3 (2025): Mistral with YaRN, and scores that grow with the query's position.

Mistral 3: the language model, Mistral or Ministral 3, of models with a vision tower. The tower is not served.
"""

from typing import Any

from model.huggingface.families.gemma.gemma3 import with_vision_tower
from model.huggingface.families.llama import MISTRAL
from model.huggingface.families.reading.layer_types import split_rope
from model.huggingface.families.reading.llama_like import derived_family, read_one_rope, read_sliding_window
from model.huggingface.families.reading.reader import ConfigReader

# `Ministral3Config`: the default of rope_parameters.
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _read_rope(reader: ConfigReader, positions: int, head_dim: int) -> dict[str, Any]:
    inner, own = split_rope(reader, ("llama_4_scaling_beta", "max_position_embeddings"))
    if not inner.has_any("rope_parameters", "rope_scaling"):
        inner, own = split_rope(ConfigReader(reader.path, {"rope_parameters": _ROPE}), ("llama_4_scaling_beta",))
    rope = read_one_rope(inner, positions, head_dim)
    growth, scaling = own.get("llama_4_scaling_beta"), rope["rope_scaling"]
    if growth is None:
        return rope
    if scaling is None or scaling.original_context_length is None:
        remedy = "needs a rope type with original_max_position_embeddings; correct the config"
        reader.reject("rope_parameters.llama_4_scaling_beta", growth, remedy)
    return {**rope, "score_growth": growth, "score_growth_interval": scaling.original_context_length}


_MINISTRAL3 = derived_family(
    "ministral3",
    "Ministral3",
    read_sliding_window,
    read_ropes=_read_rope,
    vocab_size=131072,
    intermediate_size=14336,
    num_hidden_layers=34,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=262144,
    rms_norm_eps=1e-5,
)
MISTRAL3 = (
    _MINISTRAL3,
    # Mistral Small 3.1 and 3.2, Ministral 3, Devstral Small 2. Their first files have no `tie_word_embeddings`.
    with_vision_tower(
        (MISTRAL, _MINISTRAL3),
        "mistral3",
        "Mistral3",
        tower_keys=(
            *("vision_config", "image_token_index", "multimodal_projector_bias", "projector_hidden_act"),
            *("spatial_merge_size", "vision_feature_layer"),
        ),
        is_tied=False,
    ),
)
