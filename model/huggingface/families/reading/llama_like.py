"""Definition of model families by their differences from Llama.

Source of names and defaults: the classes `…Config` and `…ForCausalLM` of the transformers library.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from model.config import ModelConfig
from model.config_enums import MlpKind, NormKind, PositionKind
from model.huggingface.families.reading.family import ModelFamily, Names, concatenated, plain
from model.huggingface.families.reading.reader import ConfigReader, read_rope

ACTIVATIONS = {
    "silu": MlpKind.SWIGLU,
    "swish": MlpKind.SWIGLU,
    "gelu_pytorch_tanh": MlpKind.GEGLU,
    "gelu_new": MlpKind.GEGLU,
    "gelu_fast": MlpKind.GEGLU,
}
QKV = ("layers.#.self_attn.q_proj", "layers.#.self_attn.k_proj", "layers.#.self_attn.v_proj")
_NAMES: dict[str, Names] = {
    "token_embedding": plain("embed_tokens"),
    "layers.#.attention_norm": plain("layers.#.input_layernorm"),
    "layers.#.attention.qkv": concatenated(*QKV),
    "layers.#.attention.out": plain("layers.#.self_attn.o_proj"),
    "layers.#.attention.query_norm": plain("layers.#.self_attn.q_norm"),
    "layers.#.attention.key_norm": plain("layers.#.self_attn.k_norm"),
    "layers.#.mlp_norm": plain("layers.#.post_attention_layernorm"),
    "layers.#.mlp.gate_up": concatenated("layers.#.mlp.gate_proj", "layers.#.mlp.up_proj"),
    "layers.#.mlp.down": plain("layers.#.mlp.down_proj"),
    "final_norm": plain("norm"),
    "lm_head": plain("lm_head"),
}


# `LlamaConfig`: default values for absent keys. num_key_value_heads None: equal to num_attention_heads. head_dim None:
# hidden_size / num_attention_heads.
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def derived_family(
    model_type: str,
    class_prefix: str,
    read_own_fields: Callable[[ConfigReader, Mapping[str, Any]], dict[str, Any]],
    *,
    renamed: Mapping[str, Names] | None = None,
    activations: Mapping[str, MlpKind] = ACTIVATIONS,
    activation_key: str = "hidden_act",
    read_ropes: Callable[[ConfigReader, int, int], dict[str, Any]] | None = None,
    **defaults: Any,
) -> ModelFamily:
    """Return a model family that is defined by its differences from Llama.

    Args:
        class_prefix: beginning of the names of the family's `transformers` classes.
        read_own_fields: function of the reader and Llama's ModelConfig fields; returns the fields that differ.
        renamed: checkpoint names of modules where they differ from Llama's, by the name in Kvasir's model.
        activations: supported values of `activation_key` in config.json, the default first.
        read_ropes: function of the reader, the number of positions and the size of heads; returns the ModelConfig
            fields of the rotary embeddings. None: `read_one_rope`, for all layers.
        defaults: values for absent keys of config.json, where they differ from Llama's.
    """
    return ModelFamily(
        model_type=model_type,
        architectures=(f"{class_prefix}ForCausalLM", f"{class_prefix}Model"),
        # The main process pickles the family for the worker process, and pickle accepts only functions of a module.
        read_config=partial(
            _read_config,
            defaults={**_DEFAULTS, **defaults},
            activations=activations,
            activation_key=activation_key,
            read_ropes=read_ropes or read_one_rope,
            read_own_fields=read_own_fields,
        ),
        names={**_NAMES, **(renamed or {})},
        prefix="model.",
        ignored_tensors=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
    )


def _read_config(
    reader: ConfigReader,
    *,
    defaults: Mapping[str, Any],
    activations: Mapping[str, MlpKind],
    activation_key: str,
    read_ropes: Callable[[ConfigReader, int, int], dict[str, Any]],
    read_own_fields: Callable[[ConfigReader, Mapping[str, Any]], dict[str, Any]],
) -> ModelConfig:
    def size(name: str) -> int:
        return reader.size(name, defaults[name])

    heads, width, positions = size("num_attention_heads"), size("hidden_size"), size("max_position_embeddings")
    kv_heads = reader.optional_size("num_key_value_heads", defaults["num_key_value_heads"])
    head_dim = reader.optional_size("head_dim", defaults["head_dim"])
    head_dim = size_of_heads(reader, width, heads) if head_dim is None else head_dim
    fields = {
        "vocab_size": size("vocab_size"),
        "max_context_length": positions,
        "num_layers": reader.num_layers("num_hidden_layers", defaults["num_hidden_layers"]),
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "mlp_size": size("intermediate_size"),
        "position": PositionKind.ROTARY,
        **read_ropes(reader, positions, head_dim),
        "norm": NormKind.RMS_NORM,
        "norm_eps": reader.number("rms_norm_eps", defaults["rms_norm_eps"]),
        "mlp": reader.choice(activation_key, next(iter(activations)), activations),
        "attention_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "tie_embeddings": reader.flag("tie_word_embeddings", defaults["tie_word_embeddings"]),
    }
    return ModelConfig(**{**fields, **read_own_fields(reader, fields)})


def read_one_rope(reader: ConfigReader, positions: int, head_dim: int, **options: Any) -> dict[str, Any]:
    """Return the ModelConfig fields of a rotary embedding that all layers share. options: those of `read_rope`."""
    rope = read_rope(reader, max_positions=positions, **options)
    return {"rope_theta": rope.theta, "rope_scaling": rope.scaling, "rotary_dim": rope.dim(head_dim)}


def read_sliding_window(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ModelConfig field of a sliding window in every layer, if config.json has one."""
    return {"sliding_window": reader.optional_size("sliding_window", None)}


def layer_norm_fields(reader: ConfigReader, width: int, heads: int) -> dict[str, Any]:
    """Return the ModelConfig fields of the sizes and norms of layers with layer norms, in which no heads share keys."""
    return {
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": size_of_heads(reader, width, heads),
        "norm": NormKind.LAYER_NORM,
        "qk_norm": False,
    }


def size_of_heads(reader: ConfigReader, width: int, heads: int) -> int:
    """Return the size of an attention head: hidden size / heads. Raises CheckpointError if not a whole number."""
    if width % heads:
        reader.reject(
            "num_attention_heads", heads, f"the hidden size {width} is not a multiple of it; correct the config"
        )
    return width // heads
