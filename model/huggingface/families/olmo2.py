"""OLMo 2 (arXiv 2501.00656): Llama with norms after attention and MLP, and q and k normalized over all heads together.

Source of names and defaults: `Olmo2Config` and `Olmo2ForCausalLM` of the transformers library.
"""

from model.config import ModelConfig
from model.config_enums import NormPlacement, QkNormScope
from model.huggingface.families.family import Family, plain
from model.huggingface.families.llama_like import IGNORED_TENSORS, NAMES, PREFIX, Defaults, read_sizes
from model.huggingface.families.reader import ConfigReader

_DEFAULTS = Defaults(
    vocab_size=50304,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    head_dim=None,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
)


def _read_config(reader: ConfigReader) -> ModelConfig:
    bias = reader.flag("attention_bias", False)
    sizes = {**read_sizes(reader, _DEFAULTS), "qk_norm": True, "qk_norm_scope": QkNormScope.PROJECTION}
    return ModelConfig(**sizes, attention_bias=bias, norm_placement=NormPlacement.POST)


OLMO2 = Family(
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    read_config=_read_config,
    names=NAMES
    | {
        "layers.#.attention_norm": plain("layers.#.post_attention_layernorm"),
        "layers.#.mlp_norm": plain("layers.#.post_feedforward_layernorm"),
    },
    prefix=PREFIX,
    aliases={},
    ignored_tensors=IGNORED_TENSORS,
)
