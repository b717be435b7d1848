"""GGUF files of the small random models in tests/families/models.py, written as llama.cpp's converter writes them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from tests.families.models import transformers

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_neox": "gptneox",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "ministral3": "mistral3",
    "cohere": "command-r",
    "hunyuan_v1_dense": "hunyuan-dense",
    "olmo3": "olmo2",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    **{
        f"{mlp}.experts.{x}_proj": f"ffn_{x}_exps"
        for mlp in ("mlp", "block_sparse_moe")
        for x in ("gate", "up", "down")
    },
}
_ONE_ADDED = ("gemma", "gemma2", "gemma3_text")
_OUT_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_OTHER_NAMES = {
    "olmo2": _OUT_NORMS,
    "olmo3": _OUT_NORMS,
    "exaone4": _OUT_NORMS,
    "bloom": {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    "gemma2": _OUT_NORMS | {"pre_feedforward_layernorm": "ffn_norm"},
    "gemma3_text": _OUT_NORMS | {"pre_feedforward_layernorm": "ffn_norm"},
    "gemma4_text": _OUT_NORMS
    | {
        "pre_feedforward_layernorm": "ffn_norm",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "layer_scalar": "layer_output_scale",
    },
}
_NAMES = {
    "embed_tokens": "token_embd",
    "wte": "token_embd",
    "word_embeddings": "token_embd",
    "word_embeddings_layernorm": "token_embd_norm",
    "embed_in": "token_embd",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "wpe": "position_embd",
    "norm": "output_norm",
    "ln_f": "output_norm",
    "final_layer_norm": "output_norm",
    "lm_head": "output",
    "embed_out": "output",
}


def write_model(
    path: Path,
    model: transformers.PreTrainedModel,
    *,
    type_name: str = "F32",
    types: dict[str, str] | None = None,
    name: str | None = "tiny",
    changes: dict[str, Any] | None = None,
    divisors: np.ndarray | None = None,
    left_out: str = "",
) -> Path:
    """Write a model of the transformers library as a GGUF file.

    Args:
        type_name: type of the matrices; a matrix whose rows do not fit the type's blocks is written in F32.
        types: types of single matrices, by the last part of their names, such as `attn_v`.
        changes: metadata that is added or replaced, by key; None: removed.
        divisors: content of rope_freqs.weight.
        left_out: name of a tensor that is not written.
    """
    config = model.config
    config.allow_global_per_layer_attribute_access = True  # of the heads' size, which differs in Gemma 4
    family = config.model_type
    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(family, family))
    if name is not None:
        writer.add_name(name)
    _write_config(writer, config)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    _change(writer, changes or {})
    for own_name, tensor in _tensors(model):
        if config.tie_word_embeddings and own_name.startswith(("lm_head", "embed_out")):
            continue
        new, kind = _gguf_name(family, own_name)
        if f"{new}.{kind}" == left_out:
            continue
        array = _as_stored(config, new, kind, tensor).float().numpy()
        wanted = gguf.GGMLQuantizationType[(types or {}).get(new.split(".")[-1], type_name)]
        block, _ = gguf.GGML_QUANT_SIZES[wanted]
        if array.ndim == 1 or array.shape[-1] % block or new.endswith("ffn_gate_inp"):
            wanted = gguf.GGMLQuantizationType.F32
        data = quantize(array, wanted)
        writer.add_tensor(f"{new}.{kind}", data, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: transformers.PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors, with gate and up of all experts of a layer as two."""
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for half, part in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{half}_proj.weight", part
        else:
            yield (f"{name}.weight" if name.endswith("experts.down_proj") else name), tensor


def _change(writer: gguf.GGUFWriter, changes: dict[str, Any]) -> None:
    add: dict[type, Callable[[str, Any], object]] = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_int32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in changes.items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            add[type(value)](key, value)


def quantize(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Quantize with the gguf package. It cannot quantize to Q4_K, Q5_K and Q6_K: their blocks get random bytes."""
    if kind.name[-1] != "K":
        return gguf.quants.quantize(array, kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (array.size // numbers, size), dtype=np.uint8)
    # float16 factors: of 2**-10 to 2**-9, so that numbers are about 1
    for place in (208,) if kind.name == "Q6_K" else (0, 2):
        blocks[:, place + 1] = 0x14
    return blocks.reshape(len(array), -1)


def _write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    family = config.model_type
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(64 if family == "bloom" else config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    inner = {"gpt2": "n_inner", "bloom": "n_inner", "falcon": "ffn_hidden_size"}.get(family, "intermediate_size")
    writer.add_feed_forward_length(getattr(config, inner, None) or 4 * config.hidden_size)
    writer.add_head_count(heads)
    if family in ("bloom", "falcon"):
        writer.add_head_count_kv(1 if family == "falcon" else heads)
        writer.add_tensor_data_layout("jploski")
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    if family == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if family == "gemma3_text" and (local := config.rope_parameters["sliding_attention"]["rope_theta"]) != 10000.0:
        writer.add_float32("gemma3.rope.freq_base_swa", local)
    theta = rope["rope_theta"]
    if family == "hunyuan_v1_dense":
        theta *= rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1.0)
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if family == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, head_dim))
    if rope["rope_type"] == "longrope":
        _write_longrope(writer, config)
    if family == "gpt_neox":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_parallel_residual(config.use_parallel_residual)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    if family in ("cohere", "cohere2", "stablelm"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
    elif family == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family == "gemma4_text":
        _write_gemma4(writer, config)
        return
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    windows = ("mistral", "mixtral", "gemma2", "gemma3_text", "cohere2", "olmo3", "exaone4", "starcoder2")
    if family in windows and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
        if family in ("gemma3_text", "olmo3", "exaone4"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if family in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if family == "stablelm":
        writer.add_parallel_residual(True)  # as the converter does if config.json has no such key
    if family in ("gemma2", "gemma3_text"):
        if config.attn_logit_softcapping is not None:
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        if config.final_logit_softcapping is not None:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if family == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family in ("granite", "granitemoe"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _write_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    layers, shared, size = config.num_hidden_layers, config.num_kv_shared_layers, config.intermediate_size
    writer.add_feed_forward_length([size] * (layers - shared) + [2 * size] * shared)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    size = config.per_layer_config[layers - 1].head_dim
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    rotated = int(size // 2 * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    divisors = np.array([1.0] * rotated + [1e30] * (size // 2 - rotated), np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)


def _write_longrope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope, original = config.rope_parameters, config.original_max_position_embeddings
    usual = np.sqrt(1 + np.log(config.max_position_embeddings / original) / np.log(original))
    writer.add_rope_scaling_attn_factors(rope.get("attention_factor", usual))
    for kind in ("long", "short"):
        writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / head_dim)
        original, low, high = (
            rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _gguf_name(family: str, name: str) -> tuple[str, str]:
    part, _, kind = name.rpartition(".")
    if kind == "layer_scalar":
        part, kind = name, "weight"
    part = part.removeprefix("model.").removeprefix("transformer.").removeprefix("gpt_neox.")
    if part in _NAMES:
        return _NAMES[part], kind
    _, layer, inner = part.split(".", 2)
    names = _LAYER_NAMES | _OTHER_NAMES.get(family, {})
    return f"blk.{layer}.{names[inner]}", kind


def _as_stored(config: Any, name: str, kind: str, tensor: Tensor) -> Tensor:
    """Return a tensor in the order of rows and with the numbers of GGUF."""
    family, part = config.model_type, name.split(".")[-1]
    if family in _ONE_ADDED and part.endswith("norm"):
        return tensor + 1
    if family == "gpt2" and kind == "weight" and tensor.dim() == 2 and name.startswith("blk"):
        return tensor.T.contiguous()
    if part == "attn_qkv" and family in ("gpt_neox", "bloom"):
        heads = tensor.view(config.num_attention_heads, 3, -1, *tensor.shape[1:])
        return heads.transpose(0, 1).reshape(tensor.shape)
    is_paired = family in ("llama", "mistral", "ministral3", "mixtral", "smollm3", "granite", "granitemoe")
    if is_paired and part in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
        halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def as_file(path: Path, model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Replace a model's matrices by those that the gguf package reads from its GGUF file."""
    reader = gguf.GGUFReader(path)
    found = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    config, state = model.config, model.state_dict()
    for name, tensor in state.items():
        new, kind = _gguf_name(config.model_type, name)
        if (stored := found.get(f"{new}.{kind}")) is None:
            continue
        # The inverse of a permutation: where `_as_stored` puts each row.
        order = torch.arange(tensor.numel()).view(tensor.shape)
        has_one_added = config.model_type in _ONE_ADDED
        places = order if has_one_added else _as_stored(config, new, kind, order)
        numbers = torch.from_numpy(np.array(stored)).float() - float(has_one_added and "norm" in new)
        tensor.view(-1)[places.reshape(-1)] = numbers.reshape(-1)
    return model
