"""Gemma 4: dense models of text alone, and the language model of those with vision and audio towers.

The towers are not served.
Source of names and defaults: the classes `…Config` and `…ForCausalLM` of the transformers library.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from model.config_enums import NormPlacement, QkNormScope
from model.huggingface.families.gemma.gemma import GEMMA2_SIZES, OUT_NORMS, TANH_ACTIVATIONS, shared_fields
from model.huggingface.families.gemma.gemma3 import read_gemma_ropes, with_vision_tower
from model.huggingface.families.reading.family import plain
from model.huggingface.families.reading.layer_types import read_layer_types
from model.huggingface.families.reading.llama_like import derived_family
from model.huggingface.families.reading.reader import ConfigReader

_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
# Read by the transformers library only if `enable_moe_block` or `attention_k_eq_v` is true.
_UNUSED_KEYS = ("num_experts", "top_k_experts", "moe_intermediate_size", "num_global_key_value_heads")
_TOWER_KEYS = """
    vision_config audio_config boi_token_id eoi_token_id image_token_id video_token_id boa_token_id eoa_token_id
    eoa_token_index audio_token_id vision_soft_tokens_per_image
"""


def _read_gemma4(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    reader.check_off("enable_moe_block", "a mixture of experts is not implemented; use a dense model")
    reader.check_off("attention_k_eq_v", "values that equal the keys are not implemented; use another model")
    for key in _UNUSED_KEYS:
        reader.value(key)
    direction = reader.value("use_bidirectional_attention")
    if direction not in (None, False, "vision"):  # "vision": only tokens of images, which are not served
        reader.note("use_bidirectional_attention", direction, "only causal models are served; use another model")
    count = fields["num_layers"]
    windows = read_layer_types(
        reader,
        count,
        window=reader.optional_size("sliding_window", 512),
        slides=lambda layer: (layer + 1) % 6 != 0 and layer != count - 1,
    )
    global_layers = windows.get("global_layers", range(count))
    if count - 1 not in global_layers:
        reader.reject("layer_types", "sliding_attention", "the last layer must have full_attention; correct the config")
    own: dict[str, Any] = {
        **windows,
        **_read_layer_inputs(reader, fields["vocab_size"]),
        **_read_shared_kv(reader, fields["mlp_size"]),
        **shared_fields(reader, fields, activation_keys=("hidden_activation", "hidden_act")),
        "norm_unit_offset": False,
        "qk_norm": True,
        "qk_norm_scope": QkNormScope.HEAD,
        "value_norm": True,
        "score_scale": 1.0,
        "norm_placement": NormPlacement.BOTH,
        "has_layer_scalar": True,
        "logit_soft_cap": reader.optional_number("final_logit_softcapping", None),
    }
    head_dim = _read_global_head_dim(reader, list(global_layers))
    if not windows:
        own |= {"head_dim": head_dim, "local_rope_theta": None}
    elif head_dim != fields["head_dim"]:
        own["global_head_dim"] = head_dim
    return own


def _read_layer_inputs(reader: ConfigReader, vocab_size: int) -> dict[str, Any]:
    size = reader.optional_count("hidden_size_per_layer_input", 256)
    rows = reader.size("vocab_size_per_layer_input", 262_144)
    if size is None:
        return {}
    if rows != vocab_size:
        reader.reject("vocab_size_per_layer_input", rows, f"must equal vocab_size={vocab_size}; use another model")
    return {"layer_input_size": size}


def _read_shared_kv(reader: ConfigReader, mlp_size: int) -> dict[str, Any]:
    """Return the ModelConfig fields of layers that read the keys and values of an earlier layer; empty if none do."""
    count, is_wide = reader.optional_count("num_kv_shared_layers", None), reader.flag("use_double_wide_mlp", False)
    if count is None:
        return {}
    return {"num_kv_shared_layers": count, **({"kv_shared_mlp_size": 2 * mlp_size} if is_wide else {})}


def _read_global_head_dim(reader: ConfigReader, global_layers: list[int]) -> int:
    """Return the size of heads in layers without a window.

    Published files have global_head_dim; the transformers library saves per_layer_config instead. Raises
    CheckpointError if per_layer_config has different sizes for these layers, or has other layers.
    """
    size, by_layer = reader.size("global_head_dim", 512), reader.value("per_layer_config")
    if by_layer is None:
        return size
    given = by_layer if isinstance(by_layer, Mapping) else {}
    layers = {int(key): values for key, values in given.items() if key.isdecimal()}  # keys may begin with zeros
    sizes = [layers.get(layer) for layer in global_layers]
    if len(given) != len(sizes) or not isinstance(sizes[0], Mapping) or any(values != sizes[0] for values in sizes):
        remedy = "expected a head_dim, the same for all full_attention layers and for no other; correct the config"
        reader.reject("per_layer_config", by_layer, remedy)
    inner = ConfigReader(reader.path, sizes[0], prefix=f"per_layer_config.{global_layers[0]}.")
    size = inner.size("head_dim", size)
    inner.check_unread()
    return size


_GEMMA4_TEXT = replace(
    derived_family(
        "gemma4_text",
        "Gemma4Text",
        _read_gemma4,
        renamed={
            **OUT_NORMS,
            "layers.#": plain("layers.#"),  # layer_scalar
            "layers.#.layer_input.gate": plain("layers.#.per_layer_input_gate"),
            "layers.#.layer_input.out": plain("layers.#.per_layer_projection"),
            "layers.#.layer_input.norm": plain("layers.#.post_per_layer_input_norm"),
            "layer_inputs.embedding": plain("embed_tokens_per_layer"),
            "layer_inputs.projection": plain("per_layer_model_projection"),
            "layer_inputs.norm": plain("per_layer_projection_norm"),
        },
        activations=TANH_ACTIVATIONS,
        activation_key="hidden_activation",
        read_ropes=partial(read_gemma_ropes, absent=_ROPES),
        **{**GEMMA2_SIZES, "vocab_size": 262_144, "num_hidden_layers": 30, "max_position_embeddings": 131_072},
    ),
    architectures=("Gemma4ForCausalLM", "Gemma4TextModel"),
    # Published files hold keys and values of layers that read those of earlier layers.
    ignored_tensors=(r"layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.(weight|bias)",),
)
GEMMA4 = (
    _GEMMA4_TEXT,
    replace(
        with_vision_tower((_GEMMA4_TEXT,), "gemma4", "Gemma4", tower_keys=tuple(_TOWER_KEYS.split()), is_tied=True),
        prefix="model.language_model.",
        other_prefixes=("language_model.model.",),
        ignored_tensors=(
            *_GEMMA4_TEXT.ignored_tensors,
            r"(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\..*",
        ),
        left_out="vision and audio towers; only the language model is loaded, and images and audio are rejected",
    ),
)
