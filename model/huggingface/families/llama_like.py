"""Llama, and families defined by their differences from Llama: Mistral, Qwen2, Qwen3, OLMo 2.

Source of names and defaults: the classes `…Config` and `…ForCausalLM` of the transformers library.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from model.config import ModelConfig
from model.config_enums import MlpKind, NormKind, NormPlacement, PositionKind, QkNormScope
from model.huggingface.families.family import ModelFamily, Names, concatenated, plain
from model.huggingface.families.reader import ConfigReader, read_rope

ACTIVATIONS = {
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


def size_of_heads(reader: ConfigReader, width: int, heads: int) -> int:
    """Return the size of an attention head: hidden size / heads. Raises CheckpointError if not a whole number."""
    if width % heads:
        reader.reject(
            "num_attention_heads", heads, f"the hidden size {width} is not a multiple of it; correct the config"
        )
    return width // heads


def _read_upper_layer_windows(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return the sliding-window fields of ModelConfig for Qwen2 and Qwen3, whose upper layers may have a window."""
    window = reader.optional_size("sliding_window", 4096)
    if not reader.flag("use_sliding_window", False):
        window = None
    first = reader.value("max_window_layers")
    if first is None:
        first = 28
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        reader.reject("max_window_layers", first, "expected a number of layers, 0 or more; correct the config")
    return read_layer_types(reader, num_layers, window=window, slides=lambda layer: layer >= first)


def read_layer_types(
    reader: ConfigReader, num_layers: int, *, window: int | None, slides: Callable[[int], bool]
) -> dict[str, Any]:
    """Return the sliding-window fields of ModelConfig: the window, and the layers without one; empty if all lack it.

    Args:
        window: the size of the window in tokens; None: no window.
        slides: returns whether a layer has the window; used only if the config has no `layer_types`.
    """
    known = ("full_attention", "sliding_attention")
    types = reader.value("layer_types")
    if types is None:
        types = [known[window is not None and slides(layer)] for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        reader.reject(
            "layer_types", types, f"expected a list of {num_layers}, each {' or '.join(known)}; correct the config"
        )
    if "sliding_attention" not in types:
        return {}
    if window is None:
        reader.reject(
            "layer_types", types, "sliding_attention needs a sliding_window that is enabled; correct the config"
        )
    global_layers = tuple(layer for layer, kind in enumerate(types) if kind == "full_attention")
    return {"sliding_window": window, "global_layers": global_layers}


def _read_llama(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: reader.flag(key, False) for key in ("attention_bias", "mlp_bias")}


def _read_mistral(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    window = reader.optional_size("sliding_window", 4096)
    return read_layer_types(reader, fields["num_layers"], window=window, slides=lambda _: True)


def _read_qwen2(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if not reader.flag("attention_bias", True):
        reader.reject("attention_bias", False, "Qwen2 has biases of q, k and v; correct the config")
    windows = _read_upper_layer_windows(reader, fields["num_layers"])
    return {"attention_bias": True, "attention_out_bias": False, **windows}


def _read_qwen3(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    bias, windows = reader.flag("attention_bias", False), _read_upper_layer_windows(reader, fields["num_layers"])
    return {"attention_bias": bias, "qk_norm": True, "qk_norm_scope": QkNormScope.HEAD, **windows}


def _read_olmo2(reader: ConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    norms = {"qk_norm": True, "qk_norm_scope": QkNormScope.PROJECTION, "norm_placement": NormPlacement.POST}
    return {"attention_bias": reader.flag("attention_bias", False), **norms}


_QWEN_SIZES: Mapping[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
LLAMA_LIKE = (
    # Llama 2 (arXiv 2307.09288) and 3 (arXiv 2407.21783): rotary embedding, RMS norm, SwiGLU, grouped-query attention.
    derived_family("llama", "Llama", _read_llama),
    # Mistral 7B (arXiv 2310.06825): a sliding window in every layer, unless `sliding_window` is null.
    derived_family(
        "mistral",
        "Mistral",
        _read_mistral,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=4096 * 32,
    ),
    # Qwen2 (arXiv 2407.10671) and Qwen2.5: biases of q, k and v, and optional windows in the upper layers.
    derived_family("qwen2", "Qwen2", _read_qwen2, **_QWEN_SIZES),
    # Qwen3 (arXiv 2505.09388): q and k normalized per head before rotation, and an explicit head size.
    derived_family("qwen3", "Qwen3", _read_qwen3, **_QWEN_SIZES, head_dim=128),
    # OLMo 2 (arXiv 2501.00656): norms after attention and MLP, and q and k normalized over all heads together.
    derived_family(
        "olmo2",
        "Olmo2",
        _read_olmo2,
        renamed={
            "layers.#.attention_norm": plain("layers.#.post_attention_layernorm"),
            "layers.#.mlp_norm": plain("layers.#.post_feedforward_layernorm"),
        },
        vocab_size=50304,
        rms_norm_eps=1e-5,
    ),
)
