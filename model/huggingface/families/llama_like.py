"""Llama-like families: tensor names, sizes and sliding windows that Llama and similar families share.

Source: `modeling_llama.py` of the transformers library, and the files of the other families there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig
from model.config_enums import MlpKind, NormKind, PositionKind
from model.huggingface.families.family import Family, Names, concatenated, plain
from model.huggingface.families.reader import ConfigReader
from model.huggingface.families.rope import read_rope

GATED_ACTIVATIONS = {
    "silu": MlpKind.SWIGLU,
    "swish": MlpKind.SWIGLU,
    "gelu_pytorch_tanh": MlpKind.GEGLU,
    "gelu_new": MlpKind.GEGLU,
    "gelu_fast": MlpKind.GEGLU,
}
_NAMES: dict[str, Names] = {
    "token_embedding": plain("embed_tokens"),
    "layers.#.attention_norm": plain("layers.#.input_layernorm"),
    "layers.#.attention.qkv": concatenated(
        "layers.#.self_attn.q_proj", "layers.#.self_attn.k_proj", "layers.#.self_attn.v_proj"
    ),
    "layers.#.attention.out": plain("layers.#.self_attn.o_proj"),
    "layers.#.attention.query_norm": plain("layers.#.self_attn.q_norm"),
    "layers.#.attention.key_norm": plain("layers.#.self_attn.k_norm"),
    "layers.#.mlp_norm": plain("layers.#.post_attention_layernorm"),
    "layers.#.mlp.gate_up": concatenated("layers.#.mlp.gate_proj", "layers.#.mlp.up_proj"),
    "layers.#.mlp.down": plain("layers.#.mlp.down_proj"),
    "final_norm": plain("norm"),
    "lm_head": plain("lm_head"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """Default values of the transformers library for absent keys. Those of `LlamaConfig` are the defaults here.

    num_key_value_heads None: equal to num_attention_heads. head_dim None: hidden_size / num_attention_heads.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False


def llama_like_family(
    model_type: str,
    class_prefix: str,
    defaults: Defaults,
    read_own_fields: Callable[[ConfigReader, Mapping[str, Any]], dict[str, Any]],
    *,
    renamed: Mapping[str, Names] | None = None,
    activations: Mapping[str, MlpKind] | None = None,
) -> Family:
    """Return a family with Llama's layers.

    Args:
        class_prefix: beginning of the names of its `transformers` classes.
        read_own_fields: reads the fields of ModelConfig that differ from Llama's; gets the fields read before.
        renamed: modules whose checkpoint names differ from Llama's.
        activations: values of `hidden_act`, the default first, if they differ from Llama's.
    """

    def read_config(reader: ConfigReader) -> ModelConfig:
        fields = _read_sizes(reader, defaults, GATED_ACTIVATIONS if activations is None else activations)
        return ModelConfig(**{**fields, **read_own_fields(reader, fields)})

    return Family(
        model_type=model_type,
        architectures=(f"{class_prefix}ForCausalLM", f"{class_prefix}Model"),
        read_config=read_config,
        names={**_NAMES, **(renamed or {})},
        prefix="model.",
        ignored_tensors=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
    )


def _read_sizes(reader: ConfigReader, defaults: Defaults, activations: Mapping[str, MlpKind]) -> dict[str, Any]:
    """Return the fields of ModelConfig that all Llama-like families read alike."""
    heads = reader.size("num_attention_heads", defaults.num_attention_heads)
    kv_heads = reader.optional_size("num_key_value_heads", defaults.num_key_value_heads)
    width = reader.size("hidden_size", defaults.hidden_size)
    head_dim = reader.optional_size("head_dim", defaults.head_dim)
    positions = reader.size("max_position_embeddings", defaults.max_position_embeddings)
    rope = read_rope(reader, max_positions=positions)
    return {
        "vocab_size": reader.size("vocab_size", defaults.vocab_size),
        "max_context_length": positions,
        "num_layers": reader.layers("num_hidden_layers", defaults.num_hidden_layers),
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": size_of_heads(reader, width, heads) if head_dim is None else head_dim,
        "mlp_size": reader.size("intermediate_size", defaults.intermediate_size),
        "position": PositionKind.ROTARY,
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "norm": NormKind.RMS_NORM,
        "norm_eps": reader.number("rms_norm_eps", defaults.rms_norm_eps),
        "mlp": reader.choice("hidden_act", next(iter(activations)), activations),
        "attention_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "tie_embeddings": reader.flag("tie_word_embeddings", defaults.tie_word_embeddings),
    }


def size_of_heads(reader: ConfigReader, width: int, heads: int) -> int:
    """Return the size of a head: width / heads. Raise CheckpointError if the width is not a multiple of heads."""
    if width % heads:
        reader.refuse("num_attention_heads", heads, f"the width of {width} is not a multiple of it; correct the config")
    return width // heads


def read_upper_layer_windows(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return the sliding-window fields of ModelConfig for Qwen2 and Qwen3.

    `layer_types` names the layers with a window. If it is absent, layers from `max_window_layers` on have a window.

    Raises:
        CheckpointError: a layer type is unsupported, or a layer needs a window but the config sets no window.
    """
    window = reader.optional_size("sliding_window", 4096)
    if not reader.flag("use_sliding_window", False):
        window = None
    first = reader.take("max_window_layers")
    if first is None:
        first = 28
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        reader.refuse("max_window_layers", first, "expected a number of layers, 0 or more; correct the config")
    return read_layer_types(reader, num_layers, window=window, first=first)


def read_layer_types(reader: ConfigReader, num_layers: int, *, window: int | None, first: int) -> dict[str, Any]:
    """Return the sliding-window fields of ModelConfig: the window, and the layers without a window.

    Args:
        window: the size of the window in tokens; None: no window.
        first: the first layer with a window, if the config has no `layer_types`.

    Raises:
        CheckpointError: a layer type is unsupported, or a layer needs a window but `window` is None.
    """
    known = ("full_attention", "sliding_attention")
    types = reader.take("layer_types")
    if types is None:
        types = [known[window is not None and layer >= first] for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        reader.refuse(
            "layer_types", types, f"expected a list of {num_layers}, each {' or '.join(known)}; correct the config"
        )
    if "sliding_attention" not in types:
        return {}
    if window is None:
        reader.refuse(
            "layer_types", types, "sliding_attention needs a sliding_window that is enabled; correct the config"
        )
    global_layers = tuple(layer for layer, kind in enumerate(types) if kind == "full_attention")
    return {"sliding_window": window, "global_layers": global_layers}
