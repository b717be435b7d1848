"""Conversion between config.json of every family and ModelConfig, in both directions."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.config_enums import Experts, MlpKind, NormPlacement, RopeScaling
from model.huggingface.families.family import ModelFamily, convert_config
from model.huggingface.families.reader import ConfigReader
from model.huggingface.families.table import FAMILIES
from model.io.files import CheckpointError

_ACTIVATIONS = {
    MlpKind.SWIGLU: "silu",
    MlpKind.GEGLU: "gelu_pytorch_tanh",
    MlpKind.GELU: "gelu_new",
    MlpKind.GELU_EXACT: "gelu",
    MlpKind.RELU: "relu",
}


def read_family_config(
    path: Path, values: Mapping[str, Any], warnings: list[str] | None = None
) -> tuple[ModelFamily, ModelConfig]:
    """Return the model family and the ModelConfig of a Hugging Face config.json; errors name it `path`.

    warnings: list to which warnings about ignored keys are added.

    Raises:
        CheckpointError: the model_type, the architecture or the value of a key is not supported.
    """
    family = FAMILIES.get(str(values.get("model_type")))
    reader = ConfigReader(path, values)
    if family is None:
        remedy = f"supported are {', '.join(FAMILIES)}; docs/families.md describes how to add one"
        reader.reject("model_type", values.get("model_type"), remedy)
    architectures = reader.value("architectures")
    named = architectures if isinstance(architectures, list) else [architectures]
    if architectures is not None and (not named or any(name not in family.architectures for name in named)):
        reader.reject(
            "architectures",
            architectures,
            f"{family.model_type} is supported only as {family.architectures[0]}; use such a checkpoint",
        )
    auto_map = values.get("auto_map")
    if auto_map and _has_usual_class(family, auto_map):
        reader.warn("auto_map", reader.value("auto_map"), f"not run; the model is computed as {family.model_type}")
    config = convert_config(family, reader)
    if warnings is not None:
        warnings += reader.warnings
    return family, config


def _has_usual_class(family: ModelFamily, auto_map: object) -> bool:
    """Return whether the language model that `auto_map` names, as module.Class, has a class name of this family."""
    if not isinstance(auto_map, Mapping):
        return False
    name = str(auto_map.get("AutoModelForCausalLM") or auto_map.get("AutoModel"))
    return name.rpartition(".")[2] in family.architectures


def hugging_face_config(config: ModelConfig, first: ModelFamily | None) -> tuple[ModelFamily, dict[str, Any]]:
    """Return a model family and config.json values that read back as this exact ModelConfig.

    first: family to try before the others, which are tried in the order of the table.

    Raises:
        CheckpointError: no family can express this ModelConfig.
    """
    for family in (*(() if first is None else (first,)), *FAMILIES.values()):
        for values in _candidates(family, config):
            named = {"model_type": family.model_type, "architectures": [family.architectures[0]], **values}
            try:
                _, read = read_family_config(Path("config.json"), json.loads(json.dumps(named)))
            except CheckpointError:
                continue
            if read == config:
                return family, named
    raise CheckpointError(
        f"no model family ({', '.join(FAMILIES)}) can express this model, so export is impossible; serve it with Kvasir"
    )


def _candidates(family: ModelFamily, config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Yield config.json values that may express a model in a family. The caller checks that they read back equal."""
    sizes: dict[str, Any] = {"vocab_size": config.vocab_size, "tie_word_embeddings": config.tie_embeddings}
    activation = _ACTIVATIONS[config.mlp]
    if family.model_type == "gpt2":
        gpt2 = {"n_positions": config.max_context_length, "n_embd": config.hidden_size, "n_layer": config.num_layers}
        inner = {"n_head": config.num_heads, "n_inner": config.mlp_size, "activation_function": activation}
        scaled = {"scale_attn_weights": config.score_scale is None}
        yield {**sizes, **gpt2, **inner, **scaled, "layer_norm_epsilon": config.norm_eps}
        return
    sizes |= {
        "max_position_embeddings": config.max_context_length,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_attention_heads": config.num_heads,
        "hidden_act": activation,
        "rope_parameters": {"rope_theta": config.rope_theta, **_scaling(config.rope_scaling)},
    }
    if family.model_type == "gpt_neox":
        sizes["rope_parameters"]["partial_rotary_factor"] = config.rotary_size / config.head_dim
        own = {"layer_norm_eps": config.norm_eps, "attention_bias": config.attention_bias}
        yield {**sizes, **own, "use_parallel_residual": config.parallel_residual}
        return
    sizes |= {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.norm_eps}
    biases = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    window = {"sliding_window": config.sliding_window}
    layers = range(config.num_layers)
    types = ["full_attention" if config.window(layer) is None else "sliding_attention" for layer in layers]
    if own := _own_values(family, config, types):
        yield {**sizes, **own}
        return
    yield {**sizes, **biases}
    yield {**sizes, **window}
    yield {**sizes, **window, "layer_types": types}
    yield {**sizes, **biases, **window, "use_sliding_window": True, "layer_types": types}
    if config.norm_placement is not NormPlacement.BOTH:
        return
    caps = {"attn_logit_softcapping": config.score_soft_cap, "final_logit_softcapping": config.logit_soft_cap}
    size = float(f"{1 / config.effective_score_scale / config.effective_score_scale:.12g}")
    gemma: dict[str, Any] = {
        "hidden_activation": activation,
        "attention_bias": config.attention_bias,
        **window,
        "layer_types": types,
    }
    sizes |= {**gemma, **caps, "query_pre_attn_scalar": int(size) if size.is_integer() else size}
    yield sizes
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    yield {**sizes, "rope_parameters": {"full_attention": sizes["rope_parameters"], "sliding_attention": local}}


def _own_values(family: ModelFamily, config: ModelConfig, types: list[str]) -> dict[str, Any]:
    """Return a model's values of the config.json keys that its family has beside Llama's.

    Empty for families of which `_candidates` tries several forms. types: kind of attention of each layer.
    """
    window = {"sliding_window": config.sliding_window}
    biases = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    partial = {"partial_rotary_factor": config.rotary_size / config.head_dim}
    experts = {} if config.experts is None else _expert_values(family, config.experts)
    match family.model_type:
        case "smollm3":
            rotated = [int(layer not in config.unrotated_layers) for layer in range(config.num_layers)]
            uses_window = config.sliding_window is not None
            windows = {**window, "use_sliding_window": uses_window, "layer_types": types}
            return {**biases, **windows, "no_rope_layers": rotated}
        case "phi3":
            original = None if config.rope_scaling is None else config.rope_scaling.original_context_length
            return {**window, **partial, **({"original_max_position_embeddings": original} if original else {})}
        case "stablelm":
            return {**partial, "layer_norm_eps": config.norm_eps, "use_qkv_bias": config.attention_bias}
        case "starcoder2":
            return {**window, "norm_epsilon": config.norm_eps, "use_bias": config.attention_bias}
        case "mixtral" | "olmoe":
            return {**biases, **window, **experts}
        case "qwen3_moe":
            return {**biases, **window, **experts, "use_sliding_window": config.sliding_window is not None}
        case "granite" | "granitemoe":
            factors = {"embedding_multiplier": config.embedding_scale, "logits_scaling": config.logit_divisor}
            return {**biases, **factors, **experts, "attention_multiplier": config.effective_score_scale}
    return {}


def _expert_values(family: ModelFamily, experts: Experts) -> dict[str, Any]:
    values: dict[str, Any] = {"num_experts": experts.num, "num_experts_per_tok": experts.num_per_token}
    if family.model_type in ("qwen3_moe", "olmoe"):
        values["norm_topk_prob"] = experts.normalizes
    if family.model_type == "qwen3_moe":
        values |= {"moe_intermediate_size": experts.mlp_size, "mlp_only_layers": list(experts.dense_layers)}
    return values


def _scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    values = {
        "rope_type": scaling.kind.value,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context_length,
        "attention_factor": scaling.attention_factor,
        "short_factor": scaling.short_divisors,
        "long_factor": scaling.long_divisors,
    }
    return {key: value for key, value in values.items() if value is not None}
