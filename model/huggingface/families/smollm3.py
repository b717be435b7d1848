"""SmolLM3: Llama's layers, of which every fourth has no positions (NoPE, arXiv 2305.19466)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from model.huggingface.families.reading.layer_types import read_layer_types
from model.huggingface.families.reading.llama_like import derived_family, read_one_rope
from model.huggingface.families.reading.reader import ConfigReader


def _read_own_fields(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(fields["num_layers"])
    interval = reader.size("no_rope_layer_interval", 4)
    rotated = reader.value("no_rope_layers")  # 1 for a layer with rotary positions, in spite of the name
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in layers]
    if not isinstance(rotated, list) or len(rotated) < len(layers) or any(flag not in (0, 1) for flag in rotated):
        reader.reject("no_rope_layers", rotated, f"expected a list of {len(layers)}, each 0 or 1; correct the config")
    reader.value("max_window_layers")  # the transformers library does not read it
    unrotated = tuple(layer for layer in layers if not rotated[layer])
    window = reader.optional_size("sliding_window", None)
    if not reader.flag("use_sliding_window", False):
        window = None
    windows = read_layer_types(reader, len(layers), window=window, slides=lambda layer: layer in unrotated)
    biases = {key: reader.flag(key, False) for key in ("attention_bias", "mlp_bias")}
    return {
        "unrotated_layers": unrotated,
        **biases,
        **windows,
    }


SMOLLM3 = derived_family(
    "smollm3",
    "SmolLM3",
    _read_own_fields,
    read_ropes=partial(read_one_rope, theta=2_000_000.0),
    vocab_size=128256,
    hidden_size=2048,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
)
