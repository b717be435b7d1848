"""OLMo 2 (arXiv 2501.00656): Llama with norms after attention and MLP, and q and k normalized over all heads together.

Source of names and defaults: `Olmo2Config` and `Olmo2ForCausalLM` of the transformers library.
"""

from collections.abc import Mapping
from typing import Any

from model.config_enums import NormPlacement, QkNormScope
from model.huggingface.families.family import plain
from model.huggingface.families.llama_like import Defaults, llama_like_family
from model.huggingface.families.reader import ConfigReader


def _read_own_fields(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": reader.flag("attention_bias", False),
        "qk_norm": True,
        "qk_norm_scope": QkNormScope.PROJECTION,
        "norm_placement": NormPlacement.POST,
    }


OLMO2 = llama_like_family(
    "olmo2",
    "Olmo2",
    Defaults(vocab_size=50304, rms_norm_eps=1e-5),
    _read_own_fields,
    renamed={
        "layers.#.attention_norm": plain("layers.#.post_attention_layernorm"),
        "layers.#.mlp_norm": plain("layers.#.post_feedforward_layernorm"),
    },
)
