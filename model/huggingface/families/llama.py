"""Llama 2 (arXiv 2307.09288) and 3 (arXiv 2407.21783): rotary embedding, RMS norm, SwiGLU, grouped-query attention.

Source of names and defaults: `LlamaConfig` and `LlamaForCausalLM` of the transformers library.
"""

from model.config import ModelConfig
from model.huggingface.families.family import Family
from model.huggingface.families.llama_like import IGNORED_TENSORS, NAMES, PREFIX, Defaults, read_sizes
from model.huggingface.families.reader import ConfigReader

_DEFAULTS = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    head_dim=None,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
)


def _read_config(reader: ConfigReader) -> ModelConfig:
    biases = {key: reader.flag(key, False) for key in ("attention_bias", "mlp_bias")}
    return ModelConfig(**{**read_sizes(reader, _DEFAULTS), **biases})


LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM", "LlamaModel"),
    read_config=_read_config,
    names=NAMES,
    prefix=PREFIX,
    aliases={},
    ignored_tensors=IGNORED_TENSORS,
)
