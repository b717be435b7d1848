"""Small random models made by the transformers library: one for each branch of a family's config."""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of the library's imports
    import transformers

from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.nn.transformer import Transformer
from tests.model.kernel_libraries import BACKENDS

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB_SIZE, CONTEXT, LAYERS = 300, 64, 3
WINDOW = 7  # shorter than any text of the tests
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}
_GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": CONTEXT}
_GQA = {"num_key_value_heads": 2}
_NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# With a head size of 16, one of the wavelengths 6, 20, 63, 199, ... is kept, two are interpolated, others stretched.
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# With a head size of 16, the first frequency is kept, two are interpolated, and the others are divided.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 10.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 2.0,
    "beta_slow": 0.2,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.8],
    "long_factor": [1.1, 2.0, 5.0, 8.0],
}
_MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.15,
    "logits_scaling": 6.0,
}
_EXPERTS = {"num_experts_per_tok": 3}
_GEMMA = _SIZES | _GQA | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_GEMMA4 = _SIZES | {
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": [*TYPES, "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 30.0,
}
_TOWERS = {"vision_config": None, "audio_config": None}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _GPT2),
    "llama": ("Llama", _SIZES),
    "mistral": ("Mistral", _SIZES | _GQA),
    "qwen2": ("Qwen2", _SIZES | _GQA),
    "qwen3": ("Qwen3", _SIZES | _GQA | {"head_dim": 16}),
    "gpt_neox": ("GPTNeoX", _SIZES),
    "opt": ("OPT", {key: _SIZES[key] for key in _SIZES if key != "intermediate_size"} | {"ffn_dim": 48}),
    "bloom": (
        "Bloom",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": LAYERS, "n_head": 4, "seq_length": CONTEXT},
    ),
    "falcon": ("Falcon", {key: _SIZES[key] for key in _SIZES if key != "intermediate_size"} | {"ffn_hidden_size": 48}),
    "gemma": ("Gemma", _SIZES | {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3_text": ("Gemma3Text", _GEMMA),
    "gemma3": ("Gemma3", {"text_config": _GEMMA | _NO_IDS, "vision_config": _VISION, "image_token_index": 299}),
    "gemma4_text": ("Gemma4Text", _GEMMA4),
    "gemma4": ("Gemma4", {"text_config": _GEMMA4 | _NO_IDS | {"pad_token_id": 0}, **_TOWERS}),
    "olmo2": ("Olmo2", _SIZES),
    "olmo3": ("Olmo3", _SIZES | _GQA | {"sliding_window": WINDOW}),
    "exaone4": ("Exaone4", _SIZES | _GQA | {"sliding_window": WINDOW}),
    "ernie4_5": ("Ernie4_5", _SIZES | _GQA | {"head_dim": 16}),
    "smollm3": ("SmolLM3", _SIZES | _GQA),
    "hunyuan_v1_dense": ("HunYuanDenseV1", _SIZES | _GQA | {"head_dim": 16}),
    "mistral3": (
        "Mistral3",
        {
            "text_config": _SIZES | _GQA | _NO_IDS | {"head_dim": 16, "model_type": "ministral3"},
            "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8},
            "image_token_index": 299,
            "tie_word_embeddings": False,
        },
    ),
    "ministral3": ("Ministral3", _SIZES | _GQA | {"head_dim": 16}),
    "cohere": ("Cohere", _SIZES | _GQA),
    "cohere2": ("Cohere2", _SIZES | _GQA | {"sliding_window": WINDOW}),
    "phi3": ("Phi3", _SIZES | _GQA),
    "granite": ("Granite", _SIZES | _GQA | _MULTIPLIERS),
    "qwen3_moe": (
        "Qwen3Moe",
        _SIZES | _GQA | {"head_dim": 16, "moe_intermediate_size": 40, **_EXPERTS, "num_experts": 6},
    ),
    "mixtral": ("Mixtral", _SIZES | _GQA | {**_EXPERTS, "num_local_experts": 6}),
    "olmoe": ("Olmoe", _SIZES | {**_EXPERTS, "num_experts": 6}),
    "granitemoe": ("GraniteMoe", _SIZES | _GQA | _MULTIPLIERS | {**_EXPERTS, "num_local_experts": 6}),
    "stablelm": ("StableLm", _SIZES | _GQA),
    "starcoder2": ("Starcoder2", _SIZES | _GQA),
}

HEADS = {
    "gpt2": "GPT2LMHeadModel",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
}


@dataclass(frozen=True)
class Case:
    """Test case: a model family, and config values besides the sizes in CLASSES."""

    family: str
    changes: dict[str, Any] = field(default_factory=dict)

    def config(self, **changes: Any) -> Any:
        """Return the transformers library's config, which imports no code of its models."""
        name, sizes = CLASSES[self.family]
        if "text_config" in sizes:
            values = sizes | {"text_config": sizes["text_config"] | self.changes | changes}
        else:
            values = _NO_IDS | sizes | self.changes | changes
        return getattr(transformers, f"{name}Config")(**values)

    def build(self, seed: int = 0, *, spread: float = 0.2, **changes: Any) -> transformers.PreTrainedModel:
        """Build the transformers library's model in float32, with no weight of zero and no norm weight of one.

        A wider spread of the weights makes the probabilities sharper and amplifies rounding errors.
        """
        config = self.config(**changes)
        config._attn_implementation = "eager"
        head = HEADS.get(self.family, f"{CLASSES[self.family][0]}ForCausalLM")
        model = getattr(transformers, head)(config).eval()
        generator = torch.Generator().manual_seed(seed)
        offset = 0.0 if self.family in ("gemma", "gemma2", "gemma3_text", "gemma3") else 1.0
        scalars = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
        with torch.no_grad():
            for parameter_name, parameter in [*model.named_parameters(), *scalars]:
                parameter.normal_(0.0, spread, generator=generator)
                if parameter.dim() == 1 and not parameter_name.endswith("bias"):
                    parameter += offset
                if self.family.startswith("gemma4") and parameter_name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter *= 0.5  # the scores have no other scale, and large scores amplify rounding errors
        return model


CASES: dict[str, Case] = {
    "gpt2": Case("gpt2"),
    "gpt2 untied": Case("gpt2", {"tie_word_embeddings": False}),
    "gpt2 exact gelu": Case("gpt2", {"activation_function": "gelu"}),
    "gpt2 relu, narrow": Case("gpt2", {"activation_function": "relu", "n_inner": 40}),
    "gpt2 unscaled": Case("gpt2", {"scale_attn_weights": False}),
    "llama mha": Case("llama"),
    "llama gqa tied": Case("llama", {**_GQA, "tie_word_embeddings": True}),
    "llama mqa biased": Case("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama wide heads": Case("llama", {**_GQA, "head_dim": 16}),
    "llama linear": Case("llama", {**_GQA, "rope_parameters": _LINEAR}),
    # Both texts of the parity tests have the frequencies of the longer one, 48 tokens: 3 times the positions.
    "llama dynamic": Case("llama", {"max_position_embeddings": 8, "rope_parameters": DYNAMIC}),
    "llama llama3": Case("llama", {**_GQA, "head_dim": 16, "rope_parameters": _LLAMA3}),
    "llama yarn": Case("llama", {**_GQA, "head_dim": 16, "rope_parameters": YARN}),
    "llama gelu": Case("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": Case("mistral", {"sliding_window": WINDOW}),
    "mistral without window": Case("mistral", {"sliding_window": None}),
    "mistral layer types": Case("mistral", {"sliding_window": WINDOW, "layer_types": TYPES}),
    "mistral full layer types": Case("mistral", {"sliding_window": WINDOW, "layer_types": ["full_attention"] * LAYERS}),
    "mistral mha tied": Case(
        "mistral", {"sliding_window": WINDOW, "num_key_value_heads": 4, "tie_word_embeddings": True}
    ),
    "qwen2": Case("qwen2"),
    "qwen2 mha tied": Case("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2 upper windows": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen2 layer types": Case("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": TYPES}),
    "qwen2 no window used": Case("qwen2", {"use_sliding_window": False, "sliding_window": WINDOW}),
    "qwen3": Case("qwen3"),
    "qwen3 tied biased": Case("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 mha linear": Case("qwen3", {"num_key_value_heads": 4, "rope_parameters": _LINEAR}),
    "qwen3 windows": Case("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "gpt_neox": Case("gpt_neox"),
    "gpt_neox sequential": Case("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox half rotary": Case("gpt_neox", {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}),
    "gpt_neox whole rotary": Case("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 1.0}}),
    "gpt_neox linear": Case("gpt_neox", {"rope_parameters": {**_LINEAR, "partial_rotary_factor": 0.5}}),
    "gpt_neox tied unbiased": Case("gpt_neox", {"tie_word_embeddings": True, "attention_bias": False}),
    "gpt_neox tanh gelu": Case("gpt_neox", {"hidden_act": "gelu_fast"}),
    "opt": Case("opt"),
    "opt untied without biases": Case(
        "opt", {"tie_word_embeddings": False, "enable_bias": False, "activation_function": "gelu"}
    ),
    "bloom": Case("bloom", {"n_head": 6, "hidden_size": 48}),
    "falcon": Case("falcon"),
    "falcon sequential mha": Case("falcon", {"bias": True, "multi_query": False, "parallel_attn": False}),
    "gemma": Case("gemma"),
    "gemma mha biased": Case("gemma", {"num_key_value_heads": 4, "attention_bias": True}),
    "gemma untied": Case("gemma", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "gemma old gelu": Case("gemma", {"hidden_act": "gelu"}),
    "gemma2": Case("gemma2"),
    "gemma2 without caps and windows": Case(
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention"] * LAYERS,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma2 low caps": Case("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2 untied biased": Case("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2 scaled by head size": Case(
        "gemma2", {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    ),
    "gemma3": Case("gemma3_text", {"rope_parameters": GEMMA_ROPES, "layer_types": TYPES}),
    "gemma3 all windows": Case("gemma3_text", {"query_pre_attn_scalar": 16}),
    "gemma3 without windows": Case("gemma3_text", {"layer_types": ["full_attention"] * LAYERS}),
    "gemma3 low cap": Case("gemma3_text", {"final_logit_softcapping": 3.0}),
    "gemma3 multimodal": Case("gemma3", {"rope_parameters": GEMMA_ROPES, "layer_types": TYPES}),
    "gemma4": Case("gemma4_text"),
    "gemma4 without shared keys": Case(
        "gemma4_text",
        {
            "num_kv_shared_layers": 0,
            "num_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma4 multimodal": Case("gemma4"),
    "olmo2": Case("olmo2"),
    "olmo2 gqa tied biased": Case("olmo2", {**_GQA, "tie_word_embeddings": True, "attention_bias": True}),
    "olmo2 llama3": Case("olmo2", {**_GQA, "rope_parameters": _LLAMA3}),
    "olmo3": Case(
        "olmo3",
        {
            "layer_types": TYPES,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "olmo3 without windows": Case("olmo3", {"layer_types": ["full_attention"] * LAYERS}),
    "exaone4": Case("exaone4", {"sliding_window_pattern": 2}),
    "exaone4 without windows": Case("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}),
    "ernie4_5": Case("ernie4_5"),
    "ernie4_5 biased untied": Case("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "smollm3": Case("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3 listed layers": Case("smollm3", {"no_rope_layers": [0, 1, 0], "tie_word_embeddings": False}),
    "smollm3 four layers": Case("smollm3", {"num_hidden_layers": 4, "attention_bias": True, "mlp_bias": True}),
    "smollm3 windows": Case(
        "smollm3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": WINDOW}
    ),
    "hunyuan": Case("hunyuan_v1_dense", {"attention_bias": True}),
    "hunyuan alpha tied": Case(
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "tie_word_embeddings": True},
    ),
    "ministral3": Case(
        "ministral3",
        {
            "rope_parameters": {
                **YARN,
                **{"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 0.5},
                "llama_4_scaling_beta": 0.5,
            }
        },
    ),
    "ministral3 windows tied": Case(
        "ministral3",
        {
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.0},
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
    ),
    "mistral3": Case("mistral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}}),
    "cohere": Case("cohere"),
    "cohere biased untied": Case(
        "cohere", {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.8333333333333334}
    ),
    "cohere2": Case("cohere2", {"num_hidden_layers": 4}),
    "phi3": Case("phi3"),
    "phi3 windows": Case("phi3", {"sliding_window": WINDOW, "num_key_value_heads": 4}),
    "phi3 partial tied": Case(
        "phi3", {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.75}, "tie_word_embeddings": True}
    ),
    "phi3 longrope beyond": Case("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "phi3 longrope within": Case(
        "phi3", {"rope_parameters": {**LONGROPE, "factor": 4.0}, "original_max_position_embeddings": CONTEXT}
    ),
    "phi3 longrope partial": Case(
        "phi3",
        {
            "rope_parameters": {
                **LONGROPE,
                **{key: LONGROPE[key][:3] for key in ("short_factor", "long_factor")},
                "partial_rotary_factor": 0.75,
                "attention_factor": 1.25,
            },
            "original_max_position_embeddings": 16,
        },
    ),
    "granite": Case("granite", {"rms_norm_eps": 0.05}),
    "granite tied biased": Case("granite", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "granite without multipliers": Case("granite", dict.fromkeys(_MULTIPLIERS, 1.0)),
    "qwen3_moe": Case("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe sparse steps tied": Case(
        "qwen3_moe", {"decoder_sparse_step": 2, "tie_word_embeddings": True, "attention_bias": True}
    ),
    "mixtral": Case("mixtral", {"sliding_window": WINDOW}),
    "olmoe": Case("olmoe", {**_GQA, "norm_topk_prob": True}),
    "olmoe probabilities": Case("olmoe"),
    "granitemoe": Case("granitemoe", {"rms_norm_eps": 0.05}),
    "stablelm": Case("stablelm"),
    "stablelm mha biased tied": Case(
        "stablelm", {"num_key_value_heads": 4, "use_qkv_bias": True, "tie_word_embeddings": True}
    ),
    "stablelm half rotary": Case("stablelm", {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}),
    "starcoder2": Case("starcoder2", {"sliding_window": WINDOW}),
    "starcoder2 without biases": Case("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "starcoder2 exact gelu": Case("starcoder2", {"hidden_act": "gelu"}),
}


def load(directory: Path, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Transformer:
    """Load a checkpoint as `kvasir serve` does."""
    manifest = read_manifest(directory)
    return load_model(manifest, device="cpu", dtype=dtype, attention=BACKENDS[attention])


def read_by_library(directory: Path) -> transformers.PreTrainedModel:
    """Load a checkpoint with the transformers library, in float32 with eager attention."""
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    auto = transformers.AutoModelForImageTextToText if kind == "mistral3" else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True)
    return model.eval()
