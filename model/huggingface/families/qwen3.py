"""Qwen3 (arXiv 2505.09388): Llama with q and k normalized per head before rotation, and an explicit head size.

Source of names and defaults: `Qwen3Config` and `Qwen3ForCausalLM` of the transformers library.
"""

from model.config import ModelConfig
from model.config_enums import QkNormScope
from model.huggingface.families.family import Family
from model.huggingface.families.llama_like import IGNORED_TENSORS, NAMES, PREFIX, Defaults, read_sizes, read_windows
from model.huggingface.families.reader import ConfigReader

_DEFAULTS = Defaults(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
)


def _read_config(reader: ConfigReader) -> ModelConfig:
    bias = reader.flag("attention_bias", False)
    sizes = {**read_sizes(reader, _DEFAULTS), "qk_norm": True, "qk_norm_scope": QkNormScope.HEAD}
    return ModelConfig(**sizes, **read_windows(reader, sizes["num_layers"]), attention_bias=bias)


QWEN3 = Family(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    read_config=_read_config,
    names=NAMES,
    prefix=PREFIX,
    aliases={},
    ignored_tensors=IGNORED_TENSORS,
)
