"""Mechanisms of other architectures that Kvasir does not compute, recognized by keys of config.json."""

from collections.abc import Iterator, Mapping
from typing import Any

_RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent"})
_RECURRENT = "recurrent layers"
# Key of config.json -> mechanism of the architectures that have this key. null means that it is off.
_MECHANISMS: Mapping[str, str] = {
    "conv_L_cache": _RECURRENT,
    "full_attention_interval": _RECURRENT,
    "hybrid_override_pattern": _RECURRENT,
    "mamba_d_conv": _RECURRENT,
    "time_step_rank": _RECURRENT,
    "kv_lora_rank": "latent attention",
    "index_topk": "sparse attention",
    "attention_chunk_size": "attention in chunks",
    "mrope_section": "positions of images",
    "swiglu_limit": "clamped activations",
    "vision_config": "a vision tower",
    "type_vocab_size": "an encoder with attention in both directions",
}


def missing_mechanisms(values: Mapping[str, Any]) -> list[str]:
    """Return mechanisms that Kvasir lacks, shown by keys of a config.json, such as "recurrent layers (mamba_d_conv)".

    One key is named for each mechanism. Empty if no key is recognized.
    """
    found: dict[str, str] = {}
    for level in _levels(values):
        if level.get("is_encoder_decoder") is True:
            found.setdefault("an encoder beside the decoder", "is_encoder_decoder")
        kinds = level.get("layer_types")
        for kind in kinds if isinstance(kinds, list) else ():
            if isinstance(kind, str) and kind in _RECURRENT_LAYERS:
                found.setdefault(_RECURRENT, f"{kind} in layer_types")
        for key, mechanism in _MECHANISMS.items():
            if level.get(key) is not None:
                found.setdefault(mechanism, key)
    return [f"{mechanism} ({key})" for mechanism, key in found.items()]


def _levels(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key in ("text_config", "rope_scaling", "rope_parameters"):
        if isinstance(inner := values.get(key), Mapping):
            yield from _levels(inner)
    yield values
