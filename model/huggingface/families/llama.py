"""Llama 2 (arXiv 2307.09288) and 3 (arXiv 2407.21783): rotary embedding, RMS norm, SwiGLU, grouped-query attention.

Source of names and defaults: `LlamaConfig` and `LlamaForCausalLM` of the transformers library.
"""

from collections.abc import Mapping
from typing import Any

from model.huggingface.families.llama_like import Defaults, llama_like_family
from model.huggingface.families.reader import ConfigReader


def _read_own_fields(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: reader.flag(key, False) for key in ("attention_bias", "mlp_bias")}


LLAMA = llama_like_family("llama", "Llama", Defaults(), _read_own_fields)
