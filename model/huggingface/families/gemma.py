"""Gemma 1 (arXiv 2403.08295): Llama with a scaled embedding, GeGLU, norms of 1 + weight, and an explicit head size.

Source of names and defaults: `GemmaConfig` and `GemmaForCausalLM` of the transformers library.
"""

from model.config import ModelConfig
from model.config_enums import MlpKind
from model.huggingface.families.family import Family
from model.huggingface.families.llama_like import (
    GATED_ACTIVATIONS,
    IGNORED_TENSORS,
    NAMES,
    PREFIX,
    Defaults,
    read_sizes,
)
from model.huggingface.families.reader import ConfigReader

_DEFAULTS = Defaults(
    vocab_size=256000,
    hidden_size=3072,
    intermediate_size=24576,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=256,
    max_position_embeddings=8192,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
)
# Released configs have "gelu" but mean the tanh approximation. The transformers library corrects this, and so does this
# table. Some configs also have hidden_activation, which is null or the tanh approximation.
_ACTIVATIONS = {"gelu": MlpKind.GEGLU, **GATED_ACTIVATIONS}
_HIDDEN_ACTIVATIONS = {"gelu_pytorch_tanh": MlpKind.GEGLU}


def _read_config(reader: ConfigReader) -> ModelConfig:
    mlp = reader.choice("hidden_act", "gelu_pytorch_tanh", _ACTIVATIONS)
    if (other := reader.take("hidden_activation")) is not None and _HIDDEN_ACTIVATIONS.get(str(other)) is not mlp:
        reader.refuse("hidden_activation", other, "hidden_act has another value; keep the correct one")
    bias = reader.flag("attention_bias", False)
    sizes = {**read_sizes(reader, _DEFAULTS), "mlp": mlp}
    return ModelConfig(
        **sizes, attention_bias=bias, norm_unit_offset=True, embedding_scale=float(sizes["hidden_size"]) ** 0.5
    )


GEMMA = Family(
    model_type="gemma",
    architectures=("GemmaForCausalLM", "GemmaModel"),
    read_config=_read_config,
    names=NAMES,
    prefix=PREFIX,
    aliases={},
    ignored_tensors=IGNORED_TENSORS,
)
