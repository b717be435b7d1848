"""Mistral 7B (arXiv 2310.06825): Llama with a sliding window in every layer, unless `sliding_window` is null.

Source of names and defaults: `MistralConfig` and `MistralForCausalLM` of the transformers library. A config with
`layer_types` is computed as `MinistralForCausalLM` does: only layers of type sliding_attention have the window.
"""

from collections.abc import Mapping
from typing import Any

from model.huggingface.families.llama_like import Defaults, llama_like_family, read_layer_types
from model.huggingface.families.reader import ConfigReader


def _read_own_fields(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    window = reader.optional_size("sliding_window", 4096)
    return read_layer_types(reader, fields["num_layers"], window=window, first=0)


MISTRAL = llama_like_family(
    "mistral",
    "Mistral",
    Defaults(intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=4096 * 32),
    _read_own_fields,
)
