"""Hunyuan 1 (dense, 2025): Llama's layers with q and k normed per head after their rotation."""

from collections.abc import Mapping
from typing import Any

from model.config_enums import QkNormScope, check_number
from model.huggingface.families.reading.family import plain
from model.huggingface.families.reading.layer_types import split_rope
from model.huggingface.families.reading.llama_like import derived_family, read_one_rope
from model.huggingface.families.reading.reader import ConfigReader

# Keys that the transformers library does not read: token ids, and sizes of parts that these models do not have.
_UNUSED_KEYS = """
    anyres_pooling_size anyres_vit_max_image_size anyres_vit_two_views attention_head_dim cla_share_factor class_num
    dense_list eod_token_id im_end_id im_newline_id im_start_id image_token_id mask_init_id org_vocab_size pad_id
    pool_type text_end_id text_start_id
"""
_COMPUTED = {"use_qk_norm": True, "use_cla": False, "norm_type": "rms", "use_rotary_pos_emb": True}


def _read_own_fields(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    for key in _UNUSED_KEYS.split():
        reader.value(key)
    reader.check_all({**_COMPUTED, "add_classification_head": False}, "not implemented; use another checkpoint")
    return {
        "attention_bias": reader.flag("attention_bias", False),
        "qk_norm": True,
        "qk_norm_scope": QkNormScope.HEAD,
        "qk_norm_after_rotation": True,
    }


def _read_rope(reader: ConfigReader, positions: int, head_dim: int) -> dict[str, Any]:
    """Return the ModelConfig fields of the rotary embedding.

    With the key `alpha` in rope_scaling, the base is multiplied by a power of `alpha`, and the keys of other types of
    scaling, such as `factor`, are ignored. Raises CheckpointError if `alpha` comes with a type other than "dynamic", or
    with a head size under 4.
    """
    inner, own = split_rope(reader, ("alpha",))
    alpha = own.get("alpha")
    if alpha is None:
        return read_one_rope(inner, positions, head_dim)
    check_number("rope_scaling.alpha", alpha)
    scaling = ("rope_type", "type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    inner, rest = split_rope(inner, scaling)
    if kinds := {str(rest[key]) for key in ("rope_type", "type") if key in rest} - {"dynamic"}:
        reader.reject("rope_scaling.type", min(kinds), 'an alpha needs the type "dynamic"; correct the config')
    if head_dim < 4:
        reader.reject("head_dim", head_dim, "an alpha needs heads of 4 or more dimensions; correct the config")
    rope = read_one_rope(inner, positions, head_dim)
    return {**rope, "rope_theta": rope["rope_theta"] * alpha ** (head_dim / (head_dim - 2))}


HUNYUAN = derived_family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1",
    _read_own_fields,
    renamed={
        "layers.#.attention.query_norm": plain("layers.#.self_attn.query_layernorm"),
        "layers.#.attention.key_norm": plain("layers.#.self_attn.key_layernorm"),
    },
    read_ropes=_read_rope,
    vocab_size=290943,
    rms_norm_eps=1e-5,
)
