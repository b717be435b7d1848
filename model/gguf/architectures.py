"""Model architectures of GGUF files, as families of Hugging Face's format with other names of keys and tensors.

Sources of names: constants.py of llama.cpp's gguf package; of permuted rows and changed norms: convert_hf_to_gguf.py.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from model.config import ModelConfig
from model.gguf.container import GgufFile
from model.huggingface.families.reading.family import Layout, ModelFamily, Names, convert_config, plain
from model.huggingface.families.reading.reader import DEFAULT_THETA, ConfigReader
from model.huggingface.families.table import FAMILIES
from model.io.files import CheckpointError, parsing, reading

_QKV = ("blk.#.attn_q", "blk.#.attn_k", "blk.#.attn_v")
_NAMES = {
    "token_embedding": plain("token_embd"),
    "position_embedding": plain("position_embd"),
    "layers.#.attention_norm": plain("blk.#.attn_norm"),
    "layers.#.attention.qkv": Names(_QKV, Layout.CONCATENATED),
    "layers.#.attention.out": plain("blk.#.attn_output"),
    "layers.#.attention.query_norm": plain("blk.#.attn_q_norm"),
    "layers.#.attention.key_norm": plain("blk.#.attn_k_norm"),
    "layers.#.mlp_norm": plain("blk.#.ffn_norm"),
    "layers.#.mlp.gate_up": Names(("blk.#.ffn_gate", "blk.#.ffn_up"), Layout.CONCATENATED),
    "layers.#.mlp.up": plain("blk.#.ffn_up"),
    "layers.#.mlp.down": plain("blk.#.ffn_down"),
    "layers.#.mlp.router": plain("blk.#.ffn_gate_inp"),
    "layers.#.mlp.experts.#.gate_up": Names(("blk.#.ffn_gate_exps[#]", "blk.#.ffn_up_exps[#]"), Layout.CONCATENATED),
    "layers.#.mlp.experts.#.down": plain("blk.#.ffn_down_exps[#]"),
    "final_norm": plain("output_norm"),
    "lm_head": plain("output"),
}
_ROTARY_FACTORS = "rope_freqs.weight"  # the scaling of Llama 3 and Gemma 4: a divisor of each rotary frequency
_LONGROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
_COMPUTED_TENSORS = (r"rope_freqs\.weight", r"rope_factors_(short|long)\.weight", r"blk\.\d+\.attn_rot_embd\.weight")
_LAYER_SCALE = "layer_output_scale.weight"
_SHARED_KV_TENSORS = r"blk\.\d+\.attn_(k|v|k_norm)\.weight"  # of Gemma 4's layers that read those of earlier ones
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_LLAMA_KEYS = {**_SIZES, "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_GRANITE_KEYS = {
    **_LLAMA_KEYS,
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
_LAYER_NORM_KEYS = {**_SIZES, "attention.layer_norm_epsilon": "layer_norm_eps"}
_COHERE_KEYS = {**_LAYER_NORM_KEYS, "logit_scale": "logit_scale"}
_EXPERT_KEYS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_QWEN3_MOE_KEYS = {**_LLAMA_KEYS, **_EXPERT_KEYS, "expert_feed_forward_length": "moe_intermediate_size"}
_STARCODER2_KEYS = {**_SIZES, "attention.layer_norm_epsilon": "norm_epsilon"}
_NEOX_KEYS = {**_LAYER_NORM_KEYS, "use_parallel_residual": "use_parallel_residual"}
_GPT2_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_BLOOM_KEYS = {**_GPT2_KEYS, "context_length": "seq_length", "embedding_length": "hidden_size"}
_FALCON_KEYS = {
    **_SIZES,
    "feed_forward_length": "ffn_hidden_size",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
# Keys that do not change the logits, or repeat what the tensors' shapes say. Files of dense Granite 4 have the sizes of
# SSM layers and of a shared expert, without their tensors.
_UNUSED_KEYS = (
    *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "expert_shared_feed_forward_length"),
    *(f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")),
)
# Keys with the value that says what is computed without them; expert gates of kind 1 are a softmax.
_STATED_DEFAULTS = {"attention.causal": True, "rope.scaling.yarn_ext_factor": 1, "expert_gating_func": 1}
# Config key for biases of q, k and v; None for families without one, which always have biases.
_BIAS_KEYS = {
    **dict.fromkeys(("qwen2", "gpt2", "bloom")),
    **dict.fromkeys(("ernie4_5", "starcoder2"), "use_bias"),
    **{"falcon": "bias", "stablelm": "use_qkv_bias"},
}
_MLP_SIZES = "gemma4.feed_forward_length"  # a number, or an array: twice as large in layers with shared keys
_WINDOWS = "attention.sliding_window_pattern"  # an array: true for each layer with a window
_LLAMA3_LENGTHS = [2**exponent for exponent in range(5, 21)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Architecture:
    """Model architecture of GGUF files, in terms of Hugging Face's format.

    model_type: `model_type` of its family in config.json.
    keys: GGUF key -> config.json key; a file must have all of these GGUF keys.
    names: module of Kvasir's model -> names and layout of its GGUF tensors.
    values: config.json values that are the same for all files of this architecture, and not stored in them.
    """

    model_type: str
    keys: Mapping[str, str]
    names: Mapping[str, Names]
    values: Mapping[str, Any]


def _architecture(
    model_type: str, names: Mapping[str, Names] = _NAMES, keys: Mapping[str, str] = _LLAMA_KEYS, **values: Any
) -> _Architecture:
    return _Architecture(model_type=model_type, keys=keys, names=names, values=values)


_PAIRED_NAMES = {**_NAMES, "layers.#.attention.qkv": Names(_QKV, Layout.ROTARY_PAIRS)}
_GPT_NAMES = {**_NAMES, "layers.#.attention.qkv": plain("blk.#.attn_qkv")}
_NORMS = {name: names for name, names in _NAMES.items() if name.endswith("_norm")}
_OUT_NORMS = {
    "layers.#.attention_out_norm": plain("blk.#.post_attention_norm"),
    "layers.#.mlp_out_norm": plain("blk.#.post_ffw_norm"),
}
_GEMMA_NAMES = {
    **_NAMES,
    **{name: Names(names.modules, Layout.ONE_ADDED) for name, names in (_NORMS | _OUT_NORMS).items()},
}
_POST_NORM_NAMES = {
    **_NAMES,
    "layers.#.attention_norm": plain("blk.#.post_attention_norm"),
    "layers.#.mlp_norm": plain("blk.#.post_ffw_norm"),
}
_GEMMA4_NAMES = {
    **_NAMES,
    **_OUT_NORMS,
    "layers.#": plain("blk.#"),  # layer_scalar
    "layers.#.layer_input.gate": plain("blk.#.inp_gate"),
    "layers.#.layer_input.out": plain("blk.#.proj"),
    "layers.#.layer_input.norm": plain("blk.#.post_norm"),
    "layer_inputs.embedding": plain("per_layer_token_embd"),
    "layer_inputs.projection": plain("per_layer_model_proj"),
    "layer_inputs.norm": plain("per_layer_proj_norm"),
}
# Number of layers of the largest Gemma 2 and Gemma 3. These two scale scores by 1/sqrt(hidden size / heads), all others
# by 1/sqrt(head size), as in llama.cpp.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
_ARCHITECTURES = {
    "llama": _architecture("llama", _PAIRED_NAMES),
    "qwen2": _architecture("qwen2"),
    "qwen3": _architecture("qwen3"),
    "qwen3moe": _architecture("qwen3_moe", keys=_QWEN3_MOE_KEYS, norm_topk_prob=True),
    "olmoe": _architecture("olmoe", keys={**_LLAMA_KEYS, **_EXPERT_KEYS}),
    "gemma": _architecture("gemma", _GEMMA_NAMES, hidden_act="gelu_pytorch_tanh"),
    "gemma2": _architecture("gemma2", _GEMMA_NAMES),
    "gemma3": _architecture("gemma3_text", _GEMMA_NAMES),
    "gemma4": _architecture("gemma4_text", _GEMMA4_NAMES),
    "olmo2": _architecture("olmo2", _POST_NORM_NAMES),
    "exaone4": _architecture("exaone4", _POST_NORM_NAMES, sliding_window=None),
    "ernie4_5": _architecture("ernie4_5", _PAIRED_NAMES),
    "hunyuan-dense": _architecture("hunyuan_v1_dense"),
    "command-r": _architecture("cohere", _PAIRED_NAMES, _COHERE_KEYS),
    "cohere2": _architecture("cohere2", _PAIRED_NAMES, _COHERE_KEYS),
    "stablelm": _architecture("stablelm", keys=_LAYER_NORM_KEYS),
    "starcoder2": _architecture("starcoder2", keys=_STARCODER2_KEYS, hidden_act="gelu_pytorch_tanh"),
    "mistral3": _architecture("ministral3", _PAIRED_NAMES),
    "smollm3": _architecture("smollm3", _PAIRED_NAMES),
    "phi3": _architecture("phi3", {**_GPT_NAMES, "layers.#.mlp.gate_up": plain("blk.#.ffn_up")}),
    "granite": _architecture("granite", _PAIRED_NAMES, _GRANITE_KEYS),
    "granitemoe": _architecture("granitemoe", _PAIRED_NAMES, {**_GRANITE_KEYS, **_EXPERT_KEYS}),
    "gpt2": _architecture("gpt2", _GPT_NAMES, _GPT2_KEYS),
    "bloom": _architecture("bloom", {**_GPT_NAMES, "embedding_norm": plain("token_embd_norm")}, _BLOOM_KEYS),
    "falcon": _architecture("falcon", _GPT_NAMES, _FALCON_KEYS),
    "gptneox": _architecture("gpt_neox", _GPT_NAMES, _NEOX_KEYS),
}
# Families of which a GGUF file can be served; llama.cpp calls Mistral and Mixtral llama, and OLMo 3 olmo2.
GGUF_FAMILIES = frozenset(
    {*(architecture.model_type for architecture in _ARCHITECTURES.values()), "mistral", "mixtral", "olmo3"}
)
_MIXTRAL = _architecture("mixtral", _PAIRED_NAMES, {**_LLAMA_KEYS, **_EXPERT_KEYS})


def read_architecture(file: GgufFile) -> tuple[ModelFamily, ModelConfig]:
    """Return the model family, with GGUF's tensor names, and the ModelConfig of a GGUF file. Raises CheckpointError."""
    if file.scalars.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{file.path}: is one of a model's several files; merge them with `llama-gguf-split --merge`"
        )
    name = file.text("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise CheckpointError(
            f"{file.path}: the architecture {name!r} is not supported; supported are {known}; use one of these"
        )
    architecture = _MIXTRAL if file.scalars.get("llama.expert_count") else _ARCHITECTURES[name]
    if file.scalars.get("olmo2.attention.sliding_window"):
        architecture = replace(architecture, model_type="olmo3")
    with parsing(file.path):
        values = _config_values(file, name, architecture)
    has_window = architecture.model_type == "llama" and "sliding_window" in values
    family = replace(
        FAMILIES["mistral" if has_window else architecture.model_type],
        names=architecture.names,
        prefix="",
        ignored_tensors=(*_COMPUTED_TENSORS, *((_SHARED_KV_TENSORS,) if name == "gemma4" else ())),
        aliases={
            tensor: tensor.replace(_LAYER_SCALE, "layer_scalar") for tensor in file.tensors if _LAYER_SCALE in tensor
        },
    )
    return family, convert_config(family, ConfigReader(file.path, values))


def _config_values(file: GgufFile, name: str, architecture: _Architecture) -> dict[str, Any]:
    """Return the config.json values that describe a GGUF file's model. Unknown metadata keeps its GGUF key."""
    found = _own_metadata(file, f"{name}.")
    values = dict(architecture.values)
    for old, key in architecture.keys.items():
        if old not in found:
            raise CheckpointError(f"{file.path}: the metadata key {name}.{old} is missing; convert the model again")
        values[key] = found.pop(old)
    if (embedding := file.tensors.get("token_embd.weight")) is None:
        raise CheckpointError(f"{file.path}: the tensor token_embd.weight is missing; convert the model again")
    values |= {"vocab_size": embedding.shape[0], "tie_word_embeddings": "output.weight" not in file.tensors}
    kv_heads = found.pop("attention.head_count_kv", None)
    if architecture.keys not in (_GPT2_KEYS, _BLOOM_KEYS):
        num_heads = values["num_attention_heads"]
        head_dim = found.pop("attention.key_length", values["hidden_size"] // num_heads)
        values |= _rotary_values(file, found, head_dim, is_partial=architecture.keys is _NEOX_KEYS)
        if architecture.keys is _FALCON_KEYS:
            values |= {"num_kv_heads": kv_heads, "multi_query": kv_heads == 1}
        elif architecture.keys is not _NEOX_KEYS:
            values |= {"num_key_value_heads": kv_heads or num_heads, "head_dim": head_dim}
            values |= _window_values(file, found, name)
            if architecture.model_type == "olmo3":
                values |= _ropes_by_kind(found, values, values["rope_parameters"]["rope_theta"])
            if name in _LARGEST_GEMMA:
                values |= _gemma_values(name, found, values)
            if name == "gemma4":
                values |= _gemma4_values(file, found, values)
    if architecture.model_type == "stablelm":  # the file's key is true for sequential layers too
        found["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in file.tensors
        found["qk_layernorm"] = "blk.0.attn_q_norm.weight" in file.tensors
    values |= _biases(file, architecture.model_type)
    return {**values, **found}  # an unknown key is rejected by its name


def _window_values(file: GgufFile, found: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the config values of layers with a window, and remove their key from `found`."""
    if "attention.sliding_window" not in found:
        return {}
    values = {"sliding_window": found.pop("attention.sliding_window")}
    if f"{name}.{_WINDOWS}" in file.arrays:
        flags = file.numbers(f"{name}.{_WINDOWS}")
        values["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in flags]
    return values


def _gemma_values(name: str, found: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the config values of Gemma 2 and 3 that need a conversion, and remove their keys from `found`."""
    size = values["head_dim"]
    if values["num_hidden_layers"] == _LARGEST_GEMMA[name]:
        size = values["hidden_size"] / values["num_attention_heads"]
    if name == "gemma2":
        return {"query_pre_attn_scalar": size}
    pattern = {"sliding_window_pattern": found.pop(_WINDOWS)} if _WINDOWS in found else {}
    return {"query_pre_attn_scalar": size, **_ropes_by_kind(found, values), **pattern}


def _ropes_by_kind(found: dict[str, Any], values: dict[str, Any], theta: float = DEFAULT_THETA) -> dict[str, Any]:
    """Return the rotary embeddings of layers without and with a window. theta: default base of those with a window."""
    local = {"rope_theta": found.pop("rope.freq_base_swa", theta)}
    return {"rope_parameters": {"full_attention": values["rope_parameters"], "sliding_attention": local}}


def _gemma4_values(file: GgufFile, found: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the config values of Gemma 4 that need a conversion, and remove their keys from `found`.

    Raises CheckpointError if the sizes of the MLPs are neither equal nor twice as large in the layers with shared keys.
    """
    head_dim = found.pop("attention.key_length_swa", None)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if found.get(key) == head_dim:  # another value is rejected as an unknown key
            del found[key]
    size, shared = values["intermediate_size"], found.pop("attention.shared_kv_layers", 0)
    sizes = file.numbers(_MLP_SIZES) if _MLP_SIZES in file.arrays else []
    is_wide = len(sizes) == values["num_hidden_layers"] >= shared and all(
        own == (size if number < len(sizes) - shared else 2 * size) for number, own in enumerate(sizes)
    )
    if not is_wide and set(sizes) > {size}:
        raise CheckpointError(
            f"{file.path}: {_MLP_SIZES} must be the same in all layers, or twice as large in the last {shared}, "
            "which share keys; others are not implemented; use another model"
        )
    return {
        "head_dim": head_dim,
        "global_head_dim": values["head_dim"],
        **_ropes_by_kind(found, values),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": found.pop("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": values["vocab_size"],
    }


def _own_metadata(file: GgufFile, prefix: str) -> dict[str, Any]:
    """Return the metadata whose keys begin with `prefix`, without the prefix, unused keys, and keys with the value 0.

    The array of layers with a window is left out. Gemma 4's array of MLP sizes becomes its first size. Any other array
    must repeat one value, and becomes this value; otherwise CheckpointError is raised.
    """
    found = {key.removeprefix(prefix): value for key, value in file.scalars.items() if key.startswith(prefix)}
    for key in file.arrays:
        if key.startswith(prefix) and key != f"{prefix}{_WINDOWS}":
            values = file.numbers(key)
            if not values or (len(set(values)) > 1 and key != _MLP_SIZES):
                raise CheckpointError(f"{file.path}: {key} is empty or differs between layers; use another model")
            found[key.removeprefix(prefix)] = values[0]
    if found.get("attention.causal") is False:
        raise CheckpointError(f"{file.path}: {prefix}attention.causal is false; use a decoder-only model")
    if prefix.startswith("granite") and found.get("rope.scaling.finetuned") is False:
        raise CheckpointError(
            f"{file.path}: {prefix}rope.scaling.finetuned is false, which for Granite means no rotary embedding; "
            "this is not implemented; use another model"
        )
    for key, value in found.items():
        if isinstance(value, float):  # of float32: 1e-06, not 9.999999974752427e-07
            found[key] = _shortest(file, f"{prefix}{key}", value)
    stated = {key for key, value in _STATED_DEFAULTS.items() if found.get(key) == value}
    # A count of 0 means that the feature is absent, for example experts.
    return {
        key: value
        for key, value in found.items()
        if key not in _UNUSED_KEYS and key not in stated and (value != 0 or isinstance(value, bool))
    }


def _shortest(file: GgufFile, name: str, value: float) -> float:
    """Return the float64 with the fewest digits that rounds to this float32. Raises CheckpointError: not finite."""
    if not math.isfinite(value):
        raise CheckpointError(f"{file.path}: {name} has the value {value}; convert the model again")
    digits = (float(f"{value:.{number}g}") for number in range(6, 10))
    return next(short for short in digits if struct.pack("f", short) == struct.pack("f", value))


def _rotary_values(file: GgufFile, found: dict[str, Any], head_dim: int, *, is_partial: bool) -> dict[str, Any]:
    """Return the config values of the rotary embedding, and remove its keys from `found`."""
    original = found.pop("rope.scaling.original_context_length", None)
    if found.pop("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(
            f"{file.path}: keys and values have different sizes, which is not implemented; use another model"
        )
    rope = {"rope_theta": found.pop("rope.freq_base", DEFAULT_THETA)}
    if (kind := found.pop("rope.scaling.type", "none")) != "none":
        rope |= {"rope_type": kind, "factor": found.pop("rope.scaling.factor", None)}
        if kind == "yarn":
            betas = {key: found.pop(f"rope.scaling.yarn_{key}", None) for key in ("beta_fast", "beta_slow")}
            betas["attention_factor"] = found.pop("rope.scaling.yarn_attn_factor", None)
            if (scale := found.pop("rope.scaling.yarn_log_multiplier", None)) is not None:
                betas |= {"mscale": 1.0, "mscale_all_dim": scale}  # llama.cpp has no other mscale
            betas["llama_4_scaling_beta"] = found.pop("attention.temperature_scale", None)
            rope |= {"original_max_position_embeddings": original, **betas}
    elif found.get("rope.scaling.factor") == 1:
        del found["rope.scaling.factor"]
    num_rotated = found.pop("rope.dimension_count", head_dim)
    share = num_rotated / head_dim
    # The next larger float, so that head_dim * share, rounded down, is never below the number in the file.
    rope |= {"partial_rotary_factor": share if share == 1 else math.nextafter(share, 2)}
    if not is_partial and _ROTARY_FACTORS in file.tensors:
        divisors = _numbers(file, _ROTARY_FACTORS, head_dim // 2)
        rope |= _frequency_scaling(file, divisors, float(rope["rope_theta"]))
    if any(name not in file.tensors for name in _LONGROPE_FACTORS.values()):
        return {"rope_parameters": rope}
    rope |= {"rope_type": "longrope", "attention_factor": found.pop("rope.scaling.attn_factor", None)}
    rope |= {key: _numbers(file, name, num_rotated // 2) for key, name in _LONGROPE_FACTORS.items()}
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


def _numbers(file: GgufFile, name: str, size: int) -> list[float]:
    """Return the numbers of a tensor. Raises CheckpointError unless it has `size` finite numbers of the type F32."""
    header = file.tensors[name]
    if header.dtype != "F32" or header.shape != (size,):
        raise CheckpointError(
            f"{file.path}: {name} has the type {header.dtype} and the shape {header.shape}, not F32 and ({size},); "
            "convert the model again"
        )
    with reading(file.path), file.path.open("rb") as source:
        source.seek(header.begin)
        return [_shortest(file, name, number) for (number,) in struct.iter_unpack("<f", source.read(4 * size))]


def _frequency_scaling(file: GgufFile, divisors: list[float], theta: float) -> dict[str, Any]:
    """Return the config values of the scaling that gives the stored divisor of each rotary frequency.

    The file does not hold these values. Llama 3: all published models have the low and high factors 1 and 4. Gemma 4:
    the frequencies after the first are 0, their divisors 1e30. Empty if all divisors are 1. Raises CheckpointError if
    no such scaling gives the divisors.
    """
    if (rotated := divisors.count(1.0)) == len(divisors):
        return {}
    if divisors[rotated:] == [1e30] * (len(divisors) - rotated):
        return {"rope_type": "proportional", "partial_rotary_factor": math.nextafter(rotated / len(divisors), 2)}
    factor = max(divisors)
    values = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wavelengths = [2 * math.pi * theta ** (number / len(divisors)) for number in range(len(divisors))]
    for length in _LLAMA3_LENGTHS if factor > 0 else ():
        smooth = [min(max((length / wavelength - 1) / 3, 0.0), 1.0) for wavelength in wavelengths]
        wanted = [1 / ((1 - part) / factor + part) for part in smooth]
        if all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(wanted, divisors, strict=True)):
            return {**values, "original_max_position_embeddings": length}
    raise CheckpointError(
        f"{file.path}: {_ROTARY_FACTORS} is not a scaling of Llama 3 or Gemma 4, and no other is implemented; "
        "use another model"
    )


def _biases(file: GgufFile, model_type: str) -> dict[str, bool]:
    """Return the config values for biases, from the tensors in the file."""
    has_attention_bias = any(f"blk.0.{name}.bias" in file.tensors for name in ("attn_q", "attn_qkv"))
    if model_type in _BIAS_KEYS:
        key = _BIAS_KEYS[model_type]
        return {} if key is None else {key: has_attention_bias}
    biases = {"attention_bias": has_attention_bias}
    return biases if model_type == "gpt_neox" else {**biases, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}
