"""StableLM 3B and StableLM 2 (arXiv 2402.17834): Llama's layers with layer norms and partial rotary positions."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from model.config_enums import NormKind
from model.huggingface.families.reading.llama_like import derived_family, read_one_rope
from model.huggingface.families.reading.reader import ConfigReader


def _read_own_fields(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    for key, what in (("use_parallel_residual", "parallel layers"), ("qk_layernorm", "a norm for each head")):
        reader.check_off(key, f"{what}, as in StableLM 2 12B, is not implemented; use another checkpoint")
    return {
        "norm": NormKind.LAYER_NORM,
        "norm_eps": reader.number("layer_norm_eps", 1e-5),
        "attention_bias": reader.flag("use_qkv_bias", False),
        "attention_out_bias": False,
    }


STABLELM = derived_family(
    "stablelm",
    "StableLm",
    _read_own_fields,
    read_ropes=partial(read_one_rope, partial_names=("partial_rotary_factor",), partial=0.25),
    vocab_size=50304,
    hidden_size=2560,
    intermediate_size=6912,
    num_key_value_heads=32,
    max_position_embeddings=4096,
)
