"""Qwen2 (arXiv 2407.10671) and Qwen2.5: Llama with biases of q, k and v, and optional windows in its upper layers.

Source of names and defaults: `Qwen2Config` and `Qwen2ForCausalLM` of the transformers library.
"""

from model.config import ModelConfig
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
    head_dim=None,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
)


def _read_config(reader: ConfigReader) -> ModelConfig:
    if not reader.flag("attention_bias", True):
        reader.refuse("attention_bias", False, "Qwen2 has biases of q, k and v; correct the config")
    sizes = read_sizes(reader, _DEFAULTS)
    windows = read_windows(reader, sizes["num_layers"])
    return ModelConfig(**sizes, **windows, attention_bias=True, attention_out_bias=False)


QWEN2 = Family(
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    read_config=_read_config,
    names=NAMES,
    prefix=PREFIX,
    aliases={},
    ignored_tensors=IGNORED_TENSORS,
)
