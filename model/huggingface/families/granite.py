"""Granite 3 and 4 (dense): Llama's layers with four constant multipliers.

The residual multiplier r needs no operation of its own. Every layer computes x + r f(norm(x)). For y = x / r that is
y + f(norm(r y)), and an RMS norm of r y with epsilon e equals an RMS norm of y with epsilon e / r². So the embedding is
divided by r, and every epsilon by r².
"""

from collections.abc import Mapping
from typing import Any

from model.huggingface.families.reading.llama_like import derived_family
from model.huggingface.families.reading.reader import ConfigReader


def read_granite(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ModelConfig fields of Granite that differ from Llama's."""
    residual = reader.number("residual_multiplier", 1.0)
    return {
        "embedding_scale": reader.number("embedding_multiplier", 1.0) / residual,
        "norm_eps": fields["norm_eps"] / residual**2,
        "score_scale": reader.number("attention_multiplier", 1.0),
        "logit_divisor": reader.number("logits_scaling", 1.0),
        **{key: reader.flag(key, False) for key in ("attention_bias", "mlp_bias")},
    }


GRANITE = derived_family("granite", "Granite", read_granite)
