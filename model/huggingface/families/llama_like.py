"""Tensor names, sizes and sliding windows that Llama and similar families share.

Source: `modeling_llama.py` of the transformers library, and the files of the other families there.
"""

from dataclasses import dataclass
from typing import Any

from model.config_enums import MlpKind, NormKind, PositionKind
from model.huggingface.families.family import Names, concatenated, plain
from model.huggingface.families.reader import ConfigReader
from model.huggingface.families.rope import read_rope

PREFIX = "model."
IGNORED_TENSORS = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"rotary_emb\.inv_freq")
GATED_ACTIVATIONS = {
    "silu": MlpKind.SWIGLU,
    "swish": MlpKind.SWIGLU,
    "gelu_pytorch_tanh": MlpKind.GEGLU,
    "gelu_new": MlpKind.GEGLU,
    "gelu_fast": MlpKind.GEGLU,
}
NAMES: dict[str, Names] = {
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
    """Default values of the transformers library for absent keys.

    num_key_value_heads None: equal to num_attention_heads. head_dim None: hidden_size / num_attention_heads.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    head_dim: int | None
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False


def read_sizes(reader: ConfigReader, defaults: Defaults) -> dict[str, Any]:
    """Return the fields of ModelConfig that all Llama-like families read alike. Each family adds more fields.

    Raises:
        CheckpointError: a key has an unsupported value.
    """
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
        "mlp": reader.choice("hidden_act", defaults.hidden_act, GATED_ACTIVATIONS),
        "mlp_bias": False,
        "qk_norm": False,
        "tie_embeddings": reader.flag("tie_word_embeddings", defaults.tie_word_embeddings),
    }


def size_of_heads(reader: ConfigReader, width: int, heads: int) -> int:
    """Return the size of a head: width / heads. Raise CheckpointError if the width is not a multiple of heads."""
    if width % heads:
        reader.refuse("num_attention_heads", heads, f"the width of {width} is not a multiple of it; correct the config")
    return width // heads


def read_windows(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return the sliding-window fields of ModelConfig for Qwen2 and Qwen3.

    `layer_types` names the layers with a window. If it is absent, layers from `max_window_layers` on have a window.

    Raises:
        CheckpointError: a layer type is unsupported, or a layer needs a window but the config sets no window.
    """
    window = reader.optional_size("sliding_window", 4096)
    if not reader.flag("use_sliding_window", False):
        window = None
    first = _count(reader, "max_window_layers", 28)
    return read_layer_types(reader, num_layers, window=window, first=first)


def read_layer_types(reader: ConfigReader, num_layers: int, *, window: int | None, first: int) -> dict[str, Any]:
    """Return the sliding-window fields of ModelConfig: the window, and the layers without a window.

    Args:
        window: the size of the window in tokens; None: no window.
        first: the first layer with a window, if the config has no `layer_types`.

    Raises:
        CheckpointError: a layer type is unsupported, or a layer needs a window but `window` is None.
    """
    types = reader.take("layer_types")
    if types is None:
        sliding = [window is not None and layer >= first for layer in range(num_layers)]
    else:
        known = {"full_attention": False, "sliding_attention": True}
        if (
            not isinstance(types, list)
            or len(types) != num_layers
            or not all(isinstance(kind, str) and kind in known for kind in types)
        ):
            reader.refuse(
                "layer_types", types, f"expected a list of {num_layers}, each {' or '.join(known)}; correct the config"
            )
        sliding = [known[kind] for kind in types]
    if not any(sliding):
        return {}
    if window is None:
        reader.refuse(
            "layer_types", types, "sliding_attention needs a sliding_window that is enabled; correct the config"
        )
    return {"sliding_window": window, "global_layers": tuple(n for n, slides in enumerate(sliding) if not slides)}


def _count(reader: ConfigReader, name: str, default: int) -> int:
    value = reader.take(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        reader.refuse(name, value, "expected a number of layers, 0 or more; correct the config")
    return value
