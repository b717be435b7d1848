"""Mistral 7B (arXiv 2310.06825): Llama with a sliding window in every layer, unless `sliding_window` is null.

Source of names and defaults: `MistralConfig` and `MistralForCausalLM` of the transformers library. A config with
`layer_types` is computed as `MinistralForCausalLM` does: only layers of type sliding_attention have the window.
"""

from model.config import ModelConfig
from model.huggingface.families.family import Family
from model.huggingface.families.llama_like import IGNORED_TENSORS, NAMES, PREFIX, Defaults, read_layer_types, read_sizes
from model.huggingface.families.reader import ConfigReader

_DEFAULTS = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=None,
    max_position_embeddings=4096 * 32,
    rms_norm_eps=1e-6,
)


def _read_config(reader: ConfigReader) -> ModelConfig:
    window = reader.optional_size("sliding_window", 4096)
    sizes = read_sizes(reader, _DEFAULTS)
    windows = read_layer_types(reader, sizes["num_layers"], window=window, first=0)
    return ModelConfig(**sizes, **windows, attention_bias=False)


MISTRAL = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    read_config=_read_config,
    names=NAMES,
    prefix=PREFIX,
    aliases={},
    ignored_tensors=IGNORED_TENSORS,
)
