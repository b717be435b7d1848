"""Reading of config.json: defaults, old and new spellings of keys, public files, and one-line errors."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint.manifest import read_manifest
from model.config import ModelConfig
from model.config_enums import RopeScaling, RopeScalingKind
from model.huggingface.families.table import FAMILIES
from model.huggingface.family_table import read_family_config
from model.io.files import CheckpointError
from tests.families.models import CASES, CLASSES, transformers
from tests.families.public_configs import CONFIG_PATH, NOT_SERVED, PUBLIC, PUBLISHED, Entry, read_published

PATH = Path("some/where/config.json")


def read(model_type: str, **values: Any) -> ModelConfig:
    return read_family_config(PATH, {"model_type": model_type, **values})[1]


# The library's default of mistral3 has contradicting values of tie_word_embeddings.
@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"mistral3"}))
def test_an_absent_key_has_the_default_of_transformers(model_type: str) -> None:
    config = getattr(transformers, f"{CLASSES[model_type][0]}Config")()
    assert read(model_type) == read_family_config(PATH, json.loads(config.to_json_string(use_diff=False)))[1]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_can_be_sent_to_the_worker(model_type: str) -> None:
    assert pickle.loads(pickle.dumps(FAMILIES[model_type])).names == FAMILIES[model_type].names


@pytest.mark.parametrize("name", PUBLIC)
def test_public_checkpoints_have_their_number_of_parameters(name: str) -> None:
    (entry,) = (entry for entry in PUBLISHED if entry["name"] == name)
    assert read_published(entry)[0].num_parameters == PUBLIC[name][0]


@pytest.mark.parametrize("entry", PUBLISHED, ids=lambda entry: entry["name"])
def test_published_configs_are_accepted(entry: Entry) -> None:
    """The only warnings are about code in the checkpoint and unknown keys without a value."""
    _, warnings = read_published(entry)
    config = {**entry["config"], **entry["config"].get("text_config", {})}
    keys = {
        warning.removeprefix(f"{CONFIG_PATH}: ").partition("=")[0].removeprefix("text_config.") for warning in warnings
    }
    assert all(key == "auto_map" or not config[key] for key in keys)
    assert ("auto_map" in keys) == ("auto_map" in config)


@pytest.mark.parametrize("entry", NOT_SERVED, ids=lambda entry: entry["name"])
def test_published_configs_of_other_families_are_refused_by_what_is_missing(entry: Entry) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_published(entry)
    message = str(caught.value)
    assert message.startswith(f"{CONFIG_PATH}: model_type={entry['config']['model_type']!r}: ")
    assert all(mechanism in message for mechanism in entry.get("lacks", ["`kvasir families` lists"]))
    assert "\n" not in message
    assert len(message) < 300


# Families of which no copy of a published config.json was found. Ministral 3 is published as `mistral3`, and Gemma 4 as
# `gemma4`.
WITHOUT_PUBLISHED = {"cohere2", "gemma4_text", "granitemoe", "ministral3"}


def test_enough_published_configs_have_a_named_source() -> None:
    assert len(PUBLISHED) >= 60
    assert {entry["config"]["model_type"] for entry in PUBLISHED} == set(FAMILIES) - WITHOUT_PUBLISHED
    assert sum("://" in entry["origin"] for entry in PUBLISHED) >= 45
    assert {"recurrent layers", "an encoder beside the decoder"} <= {
        mechanism for entry in NOT_SERVED for mechanism in entry.get("lacks", ())
    }


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_an_unknown_key_without_a_value_gives_a_warning(value: object) -> None:
    warnings: list[str] = []
    values = {"model_type": "llama", "new_key": value, "new_rope": None}
    assert read_family_config(PATH, values, warnings)[1] == read("llama")
    assert warnings == [
        f"{PATH}: new_key={value!r}: unknown key, ignored",
        f"{PATH}: new_rope=None: unknown key, ignored",
    ]


def test_a_directory_has_warnings_about_its_config(tmp_path: Path) -> None:
    CASES["llama mha"].build().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "new_key": 0}))
    assert read_manifest(tmp_path).config_warnings == (f"{path}: new_key=0: unknown key, ignored",)


def test_the_usual_class_in_a_checkpoints_own_code_gives_a_warning() -> None:
    warnings: list[str] = []
    auto_map = {"AutoConfig": "x.LlamaConfig", "AutoModelForCausalLM": "x.LlamaForCausalLM"}
    read_family_config(PATH, {"model_type": "llama", "auto_map": auto_map}, warnings)
    (warning,) = warnings
    assert warning.endswith("not run; the model is computed as llama")


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Old spelling, new spelling.
SPELLINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "theta": ("llama", {"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
    "linear": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 100},
        {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 100.0}},
    ),
    "llama3": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 256, **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 256, **LLAMA3}},
    ),
    "llama3 without its original context": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "max_position_embeddings": 512},
        {
            "rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 512, **LLAMA3},
            "max_position_embeddings": 512,
        },
    ),
    "two ropes": (
        "gemma3_text",
        {"rope_theta": 5e5, "rope_local_base_freq": 100, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "period of windows": (
        "gemma3_text",
        {"num_hidden_layers": 4, "sliding_window_pattern": 2},
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "text_config": (
        "gemma3",
        {"tie_word_embeddings": False, "text_config": {"hidden_size": 64}, "vision_config": {"depth": 2}},
        {"tie_word_embeddings": False, "text_config": {"hidden_size": 64, "tie_word_embeddings": False}},
    ),
    "both, agreeing": (
        "qwen2",
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6},
    ),
    "two words for one type": (
        "llama",
        {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "neox": (
        "gpt_neox",
        {"rotary_pct": 0.5, "rotary_emb_base": 100, "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 100}},
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_old_and_new_spellings_of_keys_give_the_same_config(name: str) -> None:
    model_type, old, new = SPELLINGS[name]
    assert read(model_type, **old) == read(model_type, **new) != read(model_type)


def test_rope_scaling_is_read_from_a_dictionary() -> None:
    config = read("llama", rope_scaling={"rope_type": "llama3", "original_max_position_embeddings": 256, **LLAMA3})
    assert config.rope_scaling == RopeScaling(
        kind=RopeScalingKind.LLAMA3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=256
    )


def test_dynamic_scaling_extends_the_context_by_its_factor() -> None:
    config = read("llama", rope_scaling={"type": "dynamic", "factor": 2.5})
    assert (config.max_context_length, config.for_context(64).max_context_length) == (5120, 64)


def test_yarn_has_the_defaults_of_transformers() -> None:
    yarn = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    scaling = read("llama", rope_scaling=yarn).rope_scaling
    assert scaling is not None
    assert (scaling.beta_fast, scaling.beta_slow) == (32, 1)
    assert scaling.rotation_factor == 0.1 * math.log(40) + 1
    both = read("llama", rope_scaling={**yarn, "mscale": 0.707, "mscale_all_dim": 1.0}).rope_scaling
    assert both is not None
    assert both.rotation_factor == (0.1 * 0.707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    without_factor = read("llama", rope_scaling={**yarn, "factor": None}, max_position_embeddings=40 * 4096)
    assert without_factor.rope_scaling == scaling


def test_harmless_config_keys_are_accepted() -> None:
    noise = {"_name_or_path": "x", "temperature": 0.3, "use_cache": False, "torch_dtype": "float16", "new_key": None}
    assert read("llama", **noise, layer_types=["full_attention"] * 32, auto_map=None) == read("llama")


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown model type": ({"model_type": "mamba"}, "model_type='mamba': not a supported family; `kvasir families`"),
    "no model type": ({"model_type": None}, "model_type=None: not a supported family"),
    "kind of MLP": ({"model_type": "starcoder2", "mlp_type": "gated"}, "mlp_type='gated': supported are default"),
    "two windows": (
        {"model_type": "gemma2", "sliding_window": 4096, "sliding_window_size": 512},
        "sliding_window_size=512.0: this family ignores this key and uses 4096; set sliding_window instead",
    ),
    "another head": ({"architectures": ["LlamaForSequenceClassification"]}, "supported only as LlamaForCausalLM"),
    "unknown key": ({"use_magic": True}, "use_magic=True: unknown key; remove it if"),
    "several keys": (
        {
            "model_type": "gemma4_text",
            "enable_moe_block": True,
            "attention_k_eq_v": True,
            "x": 1,
            "y": 2,
            "mlp_bias": True,
        },
        "enable_moe_block=True: a mix.*; attention_k_eq_v=True: .*; x=1, y=2: unknown key; .*; mlp_bias=True: not",
    ),
    "activation": ({"hidden_act": "relu2"}, "hidden_act='relu2': supported are silu"),
    "activation of gpt2": (
        {"model_type": "gpt2", "activation_function": "quick_gelu"},
        "activation_function='quick_gelu': supported are gelu_new",
    ),
    "inverse layer index": (
        {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx=True: not implemented; use",
    ),
    "cross attention": ({"model_type": "gpt2", "add_cross_attention": True}, "only decoder-only models"),
    "encoder": ({"is_encoder_decoder": True}, "is_encoder_decoder=True: only decoder-only models"),
    "bidirectional": ({"model_type": "gemma", "use_bidirectional_attention": True}, "only causal models"),
    "soft cap": (
        {"model_type": "gemma", "final_logit_softcapping": 30.0},
        "final_logit_softcapping=30.0: not implemented",
    ),
    "soft cap that transformers does not compute": (
        {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
        "attn_logit_softcapping=50.0: not implemented",
    ),
    "period of gemma2": (
        {"model_type": "gemma2", "sliding_window_pattern": 3},
        "sliding_window_pattern=3.0: this family ignores this key and uses 2; set layer_types instead",
    ),
    "rope of gemma3 without kinds of layers": (
        {"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 5.0}},
        "rope_parameters=.'rope_theta': 5.0.: expected an object with the keys full_attention and sliding_attention",
    ),
    "scaled windows": (
        {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "scaling in layers with a window is not implemented",
    ),
    "ntk in gemma3": (
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "ntk", "factor": 2.0}},
        "full_attention rope_scaling.rope_type='ntk': supported are",
    ),
    "activation of gemma2": (
        {"model_type": "gemma2", "hidden_act": "silu"},
        "hidden_act='silu': contradicts hidden_activation",
    ),
    "no norms of queries in qwen3_moe": (
        {"model_type": "qwen3_moe", "use_qk_norm": False},
        "use_qk_norm=False: only models with norms of queries and keys are served",
    ),
    "experts in gemma4": (
        {"model_type": "gemma4_text", "enable_moe_block": True},
        "enable_moe_block=True: a mixture of experts is not implemented",
    ),
    "keys as values in gemma4": (
        {"model_type": "gemma4", "text_config": {"attention_k_eq_v": True}},
        "text_config.attention_k_eq_v=True: values that equal the keys are not implemented",
    ),
    "all tokens of gemma4": (
        {"model_type": "gemma4_text", "use_bidirectional_attention": "all"},
        "use_bidirectional_attention='all': only causal models",
    ),
    "second embedding of gemma4": (
        {"model_type": "gemma4_text", "vocab_size_per_layer_input": 5},
        "vocab_size_per_layer_input=5: must equal vocab_size=262144",
    ),
    "last layer of gemma4": (
        {"model_type": "gemma4_text", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        "layer_types=.*the last layer must have full_attention",
    ),
    "no keys to share in gemma4": (
        {"model_type": "gemma4_text", "num_kv_shared_layers": 28},
        "num_kv_shared_layers=28 leaves no earlier layer of the same kind",
    ),
    "heads of one layer of gemma4": (
        {"model_type": "gemma4_text", "per_layer_config": {"5": {"head_dim": 512}}},
        "per_layer_config=.*expected a head_dim, the same for all full_attention layers",
    ),
    "unknown key of a language model": (
        {"model_type": "gemma3", "text_config": {"use_magic": True}},
        "text_config.use_magic=True: unknown key",
    ),
    "two heads": (
        {"model_type": "gemma3", "text_config": {"tie_word_embeddings": False}},
        "tie_word_embeddings=True: contradicts text_config",
    ),
    "another language model": (
        {"model_type": "mistral3", "text_config": {"model_type": "llama"}},
        "text_config.model_type='llama': supported are mistral, ministral3",
    ),
    "text_config is a word": (
        {"model_type": "gemma3", "text_config": "small"},
        "text_config='small': this key must have a JSON object",
    ),
    "own code": ({"auto_map": {"AutoModel": "x.Y"}}, "code in a checkpoint is never run"),
    "biases of mistral": ({"model_type": "mistral", "attention_bias": True}, "attention_bias=True: not implemented"),
    "biases of qwen2": ({"model_type": "qwen2", "attention_bias": False}, "Qwen2 has biases of q, k and v"),
    "window of llama": ({"sliding_window": 128}, "sliding_window=128: not implemented"),
    "layer types of llama": ({"layer_types": ["sliding_attention"]}, "layer_types=.'sliding_attention'.: unknown key"),
    "layer types of mistral": (
        {"model_type": "mistral", "sliding_window": None, "layer_types": ["sliding_attention"] * 32},
        "sliding_attention needs a sliding_window",
    ),
    "layer types too few": (
        {"model_type": "qwen2", "layer_types": ["full_attention"]},
        "a list of 32, each full_attention or",
    ),
    "layer types unknown": ({"model_type": "qwen3", "layer_types": [{}] * 32}, "a list of 32, each full_attention or"),
    "a window nowhere given": (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 32},
        "sliding_attention needs a sliding_window",
    ),
    "layers without positions": (
        {"model_type": "smollm3", "no_rope_layers": [1, 0]},
        "no_rope_layers=.1, 0.: expected a list of 36, each 0 or 1",
    ),
    "too few divisors": (
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
        "_divisors has length 1, but the model has 48 rotary frequencies",
    ),
    "no divisors": (
        {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1]}},
        "rope_scaling long_divisors must be a list of positive numbers",
    ),
    "two original contexts": (
        {"model_type": "phi3", "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 8192}},
        "original_max_position_embeddings=8192: contradicts original_max_position_embeddings=4096",
    ),
    "parallel layers of stablelm": (
        {"model_type": "stablelm", "use_parallel_residual": True},
        "use_parallel_residual=True: parallel layers, as in StableLM 2 12B, is not implemented",
    ),
    "no residuals": ({"model_type": "granite", "residual_multiplier": 0}, "residual_multiplier must be a positive"),
    "dynamic": ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling factor must be a positive number"),
    "dynamic without bounds": (
        {"rope_scaling": {"type": "dynamic", "factor": 1e308}},
        "max_context_length must be at most 2,147,483,647",
    ),
    "dynamic with another context": (
        {"rope_scaling": {"type": "dynamic", "factor": 2, "original_max_position_embeddings": 1024}},
        "rope_scaling.original_max_position_embeddings=1024: must be 2048, the context",
    ),
    "yarn without rounding": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4, "truncate": False}},
        "rope_scaling.truncate=False: a ramp that is not rounded is not implemented",
    ),
    "two types": ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "'linear and llama3': supported are"),
    "rope key": ({"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}}, "rope_scaling.mscale=1: not a key of"),
    "rope a layer": ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention={}: not a key"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "config.json: rope_scaling factor must be a positive number"),
    "no frequencies": ({"rope_scaling": {"type": "llama3", "factor": 2}}, "low_freq_factor must be a positive number"),
    "rope is a word": ({"rope_scaling": "linear"}, "rope_scaling='linear': expected a JSON object or null"),
    "two ropes": (
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5}},
        "contradicts rope_parameters",
    ),
    "two thetas": (
        {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}},
        "rope_theta=5.0: contradicts rope_par.*=6.0",
    ),
    "partial llama": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: this family"),
    "partial at the top": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: not implemented"),
    "partial that neox does not read": (
        {"model_type": "gpt_neox", "partial_rotary_factor": 0.5},
        "partial_rotary_factor=0.5: this family ignores this key and uses 0.25; set rotary_pct instead",
    ),
    "whole that neox does not read": (
        {"model_type": "gpt_neox", "rope_parameters": {"rope_theta": 5.0}, "partial_rotary_factor": 1.0},
        "partial_rotary_factor=1.0: this family ignores this key",
    ),
    "theta that neox does not read": (
        {"model_type": "gpt_neox", "rope_theta": 5.0, "rotary_emb_base": 7},
        "rope_theta=5.0: this family ignores this key and uses 7.0; set rotary_emb_base instead",
    ),
    "more than a head": ({"model_type": "gpt_neox", "rotary_pct": 1.5}, "at most 1.0"),
    "nothing rotated": ({"model_type": "gpt_neox", "rotary_pct": 0.001}, "rotary_dim must be a positive integer"),
    "context beyond the positions": (
        {"model_type": "gpt2", "n_ctx": 2048},
        "n_ctx=2048: n_ctx must equal n_positions, 1024",
    ),
    "norms of opt-350m": (
        {"model_type": "opt", "do_layer_norm_before": False},
        "do_layer_norm_before=False: not implemented; use a checkpoint",
    ),
    "embeddings of opt-350m": (
        {"model_type": "opt", "hidden_size": 1024, "num_attention_heads": 16, "word_embed_proj_dim": 512},
        "word_embed_proj_dim=512: embeddings narrower than the hidden size 1024",
    ),
    "residuals of bloom": (
        {"model_type": "bloom", "apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm=True: not implemented",
    ),
    "two widths": (
        {"model_type": "bloom", "hidden_size": 64, "n_embed": 32},
        "n_embed=32: contradicts hidden_size=64; remove the wrong key",
    ),
    "width of bloom's mlp": ({"model_type": "bloom", "n_inner": 100}, "n_inner=100: this family has 256"),
    "falcon 40b": (
        {"model_type": "falcon", "new_decoder_architecture": True},
        "new_decoder_architecture=True: not implemented; use a checkpoint without it, such as Falcon 7B",
    ),
    "biases of falcon rw": ({"model_type": "falcon", "alibi": True}, "alibi=True: not implemented; use a checkpoint"),
    "two norms of falcon": (
        {"model_type": "falcon", "num_ln_in_parallel_attn": 2},
        "num_ln_in_parallel_attn=2: not impl",
    ),
    "groups of falcon": (
        {"model_type": "falcon", "multi_query": False, "num_kv_heads": 8},
        "num_kv_heads=8: must be 71, the heads, without multi_query",
    ),
    "uneven heads": ({"num_attention_heads": 31}, "num_attention_heads=31: the hidden size 4096 is not a multiple"),
    "uneven groups": ({"num_key_value_heads": 5}, "num_heads=32 is not a multiple of num_kv_heads=5; correct"),
    "size is a word": ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
    "size is negative": ({"num_hidden_layers": -1}, "num_hidden_layers must be a positive integer"),
    "layers of a billion": ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: at most 10,000 layers are"),
    "layers of a billion with windows": ({"model_type": "qwen2", "num_hidden_layers": 10**9}, "at most 10,000 layers"),
    "layers of a billion in gpt2": ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer=1000000000: at most 10,000"),
    "size is null": ({"hidden_size": None}, "hidden_size must be a positive integer"),
    "flag is a word": ({"attention_bias": "yes"}, "attention_bias='yes': expected true or false"),
    "epsilon is infinite": ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number"),
    "tanh and not": (
        {"model_type": "gemma", "hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"},
        "contradicts hidden_act",
    ),
    "first window": ({"model_type": "qwen2", "max_window_layers": -1}, "expected a number of layers"),
    "a long value": ({"use_magic": ["x" * 1000] * 1000}, "use_magic="),
    "a value of lines": ({"use_magic": "a\nb"}, r"use_magic='a\\nb'"),
    "a key of lines": ({"use\nmagic": 1}, r"'use\\nmagic'=1: unknown key"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_error_names_the_config_key_of_a_missing_feature(name: str) -> None:
    values, message = REFUSALS[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        read_family_config(PATH, {"model_type": "llama", **values})
    assert str(caught.value).startswith(f"{PATH}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_configs_of_different_test_cases_stay_different(tmp_path: Path) -> None:
    """Kvasir reads the config.json that transformers wrote for each case of a family as another ModelConfig."""
    configs: dict[str, list[ModelConfig]] = {}
    for case in CASES.values():
        values = json.loads(case.build().config.to_json_string())
        configs.setdefault(case.family, []).append(read_family_config(tmp_path / "config.json", values)[1])
    for family, found in configs.items():
        # Gemma's old name for its activation gives the same model, and so does a window that no layer uses.
        duplicates = len(found) - len(set(map(repr, found)))
        assert duplicates == {"gemma": 1, "mistral": 1, "qwen2": 1}.get(family, 0), family
