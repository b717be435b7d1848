"""Mixtures of experts: Qwen3 MoE, Mixtral, OLMoE and Granite MoE, each with the layers of its dense family."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from model.config_enums import Experts, QkNormScope, check_size
from model.huggingface.families.granite import read_granite
from model.huggingface.families.reading.family import Names, concatenated, plain
from model.huggingface.families.reading.llama_like import derived_family, read_one_rope
from model.huggingface.families.reading.reader import ConfigReader

_EXPERT = "layers.#.mlp.experts.#"
_NAMES: dict[str, Names] = {
    "layers.#.mlp.router": plain("layers.#.mlp.gate"),
    f"{_EXPERT}.gate_up": concatenated(f"{_EXPERT}.gate_proj", f"{_EXPERT}.up_proj"),
    f"{_EXPERT}.down": plain(f"{_EXPERT}.down_proj"),
}
_MIXTRAL = "layers.#.block_sparse_moe"
_MIXTRAL_NAMES: dict[str, Names] = {
    "layers.#.mlp.router": plain(f"{_MIXTRAL}.gate"),
    f"{_EXPERT}.gate_up": concatenated(f"{_MIXTRAL}.experts.#.w1", f"{_MIXTRAL}.experts.#.w3"),
    f"{_EXPERT}.down": plain(f"{_MIXTRAL}.experts.#.w2"),
}
# Granite stores one tensor for all experts of a layer.
_GRANITE_NAMES: dict[str, Names] = {
    "layers.#.mlp.router": plain(f"{_MIXTRAL}.router.layer"),
    f"{_EXPERT}.gate_up": plain(f"{_MIXTRAL}.input_linear[#]"),
    f"{_EXPERT}.down": plain(f"{_MIXTRAL}.output_linear[#]"),
}


def _num_experts(reader: ConfigReader, default: int) -> int:
    """Return the number of experts of a layer, from the config key num_experts or num_local_experts.

    Raises CheckpointError if they differ.
    """
    names = ("num_experts", "num_local_experts")
    given = {name: value for name in names if (value := reader.value(name)) is not None}
    for name, value in given.items():
        check_size(name, value)
        if value != next(iter(given.values())):
            reader.reject(name, value, f"contradicts {names[0]}={given[names[0]]}; remove the wrong key")
    return int(next(iter(given.values()), default))


def _experts_of_all_layers(
    reader: ConfigReader, fields: Mapping[str, Any], *, num: int, num_per_token: int, normalizes: bool
) -> dict[str, Experts]:
    """Return the field `experts` of ModelConfig, for experts in all layers. num, num_per_token: defaults."""
    return {
        "experts": Experts(
            num=_num_experts(reader, num),
            num_per_token=reader.size("num_experts_per_tok", num_per_token),
            mlp_size=fields["mlp_size"],
            normalizes=normalizes,
        )
    }


def _read_qwen3_moe(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    period, layers = reader.size("decoder_sparse_step", 1), range(fields["num_layers"])
    listed = reader.value("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        reader.reject("mlp_only_layers", listed, "expected a list of layer numbers; correct the config")
    if not reader.flag("use_qk_norm", True):  # a key of Qwen3-Coder
        reader.reject("use_qk_norm", False, "only models with norms of queries and keys are served; use another model")
    window = reader.optional_size("sliding_window", 4096)
    reader.value("max_window_layers")  # Qwen3's key: here all layers have the window, or none
    return {
        "sliding_window": window if reader.flag("use_sliding_window", False) else None,
        "attention_bias": reader.flag("attention_bias", False),
        "qk_norm": True,
        "experts": Experts(
            num=_num_experts(reader, 128),
            num_per_token=reader.size("num_experts_per_tok", 8),
            mlp_size=reader.size("moe_intermediate_size", 768),
            normalizes=reader.flag("norm_topk_prob", False),
            dense_layers=tuple(layer for layer in layers if layer in listed or (layer + 1) % period),
        ),
    }


def _read_mixtral(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    experts = _experts_of_all_layers(reader, fields, num=8, num_per_token=2, normalizes=True)
    return {"sliding_window": reader.optional_size("sliding_window", None), **experts}


def _read_olmoe(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    normalizes = reader.flag("norm_topk_prob", False)
    return {
        "attention_bias": reader.flag("attention_bias", False),
        "qk_norm": True,
        "qk_norm_scope": QkNormScope.PROJECTION,
        **_experts_of_all_layers(reader, fields, num=64, num_per_token=8, normalizes=normalizes),
    }


def _read_granitemoe(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    # The softmax over the chosen experts equals the normalized softmax over all experts.
    experts = _experts_of_all_layers(reader, fields, num=8, num_per_token=2, normalizes=True)
    return {**read_granite(reader, fields), **experts}


MIXTURES = (
    # Qwen3 30B-A3B and 235B-A22B (arXiv 2505.09388): Qwen3 with many small experts; some layers may have none.
    derived_family(
        "qwen3_moe",
        "Qwen3Moe",
        _read_qwen3_moe,
        renamed=_NAMES,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_key_value_heads=4,
        max_position_embeddings=32768,
    ),
    # Mixtral 8x7B (arXiv 2401.04088): Mistral with two of eight experts.
    derived_family(
        "mixtral",
        "Mixtral",
        _read_mixtral,
        renamed=_MIXTRAL_NAMES,
        read_ropes=partial(read_one_rope, theta=1e6),
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=4096 * 32,
        rms_norm_eps=1e-5,
    ),
    # OLMoE 1B-7B (arXiv 2409.02060): q and k normalized over all heads together, eight of 64 experts.
    derived_family(
        "olmoe",
        "Olmoe",
        _read_olmoe,
        renamed=_NAMES,
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    ),
    # Granite 3.0 1B-A400M and 3B-A800M: Granite's multipliers.
    derived_family("granitemoe", "GraniteMoe", _read_granitemoe, renamed=_GRANITE_NAMES),
)
