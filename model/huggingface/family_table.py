"""Conversion between config.json of every family and ModelConfig, in both directions."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.config_enums import Experts, MlpKind, NormPlacement, RopeScaling
from model.huggingface.families.reading.family import ModelFamily, convert_config
from model.huggingface.families.reading.reader import ConfigReader
from model.huggingface.families.table import FAMILIES
from model.huggingface.unserved import missing_mechanisms
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
    """Return the model family and the ModelConfig of a Hugging Face config.json. Errors name the file `path`.

    warnings: list to which warnings about ignored keys are added.

    Raises:
        CheckpointError: the model_type, the architecture or the value of a key is not supported.
    """
    family = FAMILIES.get(str(values.get("model_type")))
    reader = ConfigReader(path, values)
    if family is None:
        missing = missing_mechanisms(values)
        problem = f"needs {' and '.join(missing)}, not implemented" if missing else "not a supported family"
        remedy = "`kvasir families` lists the supported ones, and docs/families.md describes how to add one"
        reader.reject("model_type", values.get("model_type"), f"{problem}; {remedy}")
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
    for found in hugging_face_configs(config, first):
        return found
    raise CheckpointError(
        f"no model family ({', '.join(FAMILIES)}) can express this model, so export is impossible; serve it with Kvasir"
    )


def hugging_face_configs(
    config: ModelConfig, first: ModelFamily | None = None
) -> Iterator[tuple[ModelFamily, dict[str, Any]]]:
    """Yield each model family that can express this ModelConfig, with config.json values that read back as it."""
    for family in (*(() if first is None else (first,)), *FAMILIES.values()):
        for values in _candidates(family, config):
            named = {"model_type": family.model_type, "architectures": [family.architectures[0]], **values}
            try:
                _, read = read_family_config(Path("config.json"), json.loads(json.dumps(named)))
            except CheckpointError:
                continue
            if read == config:
                yield family, named
                break


def _candidates(family: ModelFamily, config: ModelConfig) -> Iterator[dict[str, Any]]:
    """Yield config.json values that may express a model in a family. The caller checks that they read back equal."""
    sizes: dict[str, Any] = {"vocab_size": config.vocab_size, "tie_word_embeddings": config.tie_embeddings}
    activation = _ACTIVATIONS[config.mlp]
    if own_sizes := _own_sizes(family, config):
        yield {**sizes, **own_sizes}
        return
    sizes |= {
        "max_position_embeddings": _positions(config),
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


def _own_sizes(family: ModelFamily, config: ModelConfig) -> dict[str, Any]:
    """Return all config.json values of a model in a family whose keys for sizes are not Llama's, such as GPT-2.

    Empty for other families.
    """
    layers, width, heads = config.num_layers, config.hidden_size, config.num_heads
    positions, activation = _positions(config), _ACTIVATIONS[config.mlp]
    eps = {"layer_norm_epsilon": config.norm_eps}
    named = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    match family.model_type:
        case "gpt2":
            sizes = {"n_positions": positions, "n_embd": width, "n_layer": layers, "n_head": heads}
            inner = {"n_inner": config.mlp_size, "activation_function": activation}
            return {**sizes, **inner, **eps, "scale_attn_weights": config.score_scale is None}
        case "opt":
            inner = {"ffn_dim": config.mlp_size, "activation_function": activation}
            return {"max_position_embeddings": positions, **named, **inner, "enable_bias": config.mlp_bias}
        case "bloom":
            return {"seq_length": positions, "hidden_size": width, "n_layer": layers, "n_head": heads, **eps}
        case "falcon":
            return {
                "max_position_embeddings": positions,
                **named,
                "ffn_hidden_size": config.mlp_size,
                "activation": activation,
                **eps,
                "bias": config.mlp_bias,
                "multi_query": config.num_kv_heads == 1,
                "parallel_attn": config.parallel_residual,
                "rope_parameters": {"rope_theta": config.rope_theta, **_scaling(config.rope_scaling)},
            }
    return {}


def _own_values(family: ModelFamily, config: ModelConfig, types: list[str]) -> dict[str, Any]:
    """Return a model's values of the config.json keys that its family adds to Llama's.

    Empty for other families, for which `_candidates` tries several sets of keys. types: attention kind by layer.
    """
    window = {"sliding_window": config.sliding_window}
    biases = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    rope = {"rope_theta": config.rope_theta, **_scaling(config.rope_scaling)}
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
        case "olmo3":
            ropes = dict.fromkeys(("full_attention", "sliding_attention"), rope)
            if config.local_rope_theta is not None:
                ropes["sliding_attention"] = {"rope_theta": config.local_rope_theta}
            return {**biases, **window, "layer_types": types, "rope_parameters": ropes}
        case "exaone4":
            return {**window, "layer_types": types}
        case "hunyuan_v1_dense":
            return biases
        case "ministral3":
            rope["llama_4_scaling_beta"] = config.score_growth or 0.0
            return {**window, "rope_parameters": rope}
        case "cohere" | "cohere2":
            own = {"layer_norm_eps": config.norm_eps, "logit_scale": 1 / config.logit_divisor}
            windows = {**window, "layer_types": types} if family.model_type == "cohere2" else {}
            return {"attention_bias": config.attention_bias, **own, **windows}
        case "ernie4_5":
            return {"use_bias": config.attention_bias}
        case "stablelm":
            return {**partial, "layer_norm_eps": config.norm_eps, "use_qkv_bias": config.attention_bias}
        case "starcoder2":
            return {**window, "norm_epsilon": config.norm_eps, "use_bias": config.attention_bias}
        case "gemma4_text":
            return {**window, "layer_types": types, **_gemma4_values(config, rope)}
        case "mixtral" | "olmoe":
            return {**biases, **window, **experts}
        case "qwen3_moe":
            return {**biases, **window, **experts, "use_sliding_window": config.sliding_window is not None}
        case "granite" | "granitemoe":
            factors = {"embedding_multiplier": config.embedding_scale, "logits_scaling": config.logit_divisor}
            return {**biases, **factors, **experts, "attention_multiplier": config.effective_score_scale}
    return {}


def _positions(config: ModelConfig) -> int:
    """Return the number of positions in config.json: with dynamic scaling, those before the extension."""
    original = None if config.rope_scaling is None else config.rope_scaling.dynamic_original
    return config.max_context_length if original is None else original


def _gemma4_values(config: ModelConfig, rope: dict[str, Any]) -> dict[str, Any]:
    local = {"rope_theta": config.local_rope_theta or config.rope_theta, "rope_type": "default"}
    return {
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "attention_bias": config.attention_bias,
        "global_head_dim": config.largest_head_dim,
        "num_kv_shared_layers": config.num_kv_shared_layers or 0,
        "use_double_wide_mlp": config.kv_shared_mlp_size is not None,
        "hidden_size_per_layer_input": config.layer_input_size or 0,
        "vocab_size_per_layer_input": config.vocab_size,
        "final_logit_softcapping": config.logit_soft_cap,
    }


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
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "short_factor": scaling.short_divisors,
        "long_factor": scaling.long_divisors,
        "partial_rotary_factor": scaling.rotated_fraction,
    }
    return {key: value for key, value in values.items() if value is not None}
