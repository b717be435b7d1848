"""ModelConfig and SamplingParams reject invalid values, and the parameter shapes match the module."""

import dataclasses
import math
from typing import Any

import pytest

from model.config import ModelConfig
from model.sampling.params import SamplingParams
from tests.model.configs import DISENTANGLED, LLAMA3, LONGROPE, RELATIVE, ROTARY, VARIANTS, YARN, build


@pytest.mark.parametrize("name", VARIANTS)
def test_parameter_shapes_equal_those_of_the_module(name: str) -> None:
    config = VARIANTS[name]
    state = {key: tuple(tensor.shape) for key, tensor in build(config).state_dict().items()}
    assert list(config.parameter_shapes().items()) == list(state.items())
    assert config.num_parameters == sum(math.prod(shape) for shape in state.values())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_config_survives_a_round_trip_through_a_dictionary(name: str) -> None:
    assert ModelConfig.from_dict(VARIANTS[name].to_dict()) == VARIANTS[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads must be a positive integer"),
        ({"num_layers": True}, "num_layers must be a positive integer"),
        ({"num_kv_heads": 3}, "not a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "even head_dim"),
        ({"norm_eps": -1.0}, "norm_eps must be a positive number"),
        ({"rope_theta": math.inf}, "rope_theta must be a positive number"),
        ({"mlp": "selu"}, "mlp must be one of gelu, gelu_exact, relu, swiglu, geglu"),
        ({"num_layers": 10**9}, "num_layers must be at most 10,000"),
        ({"hidden_size": 10**400}, "hidden_size must be at most 2,147,483,647, not a number of 401 digits"),
        ({"norm_eps": 10**400}, "norm_eps must be a positive number"),
        ({"score_scale": 0}, "score_scale must be a positive number"),
        ({"score_scale": ""}, "score_scale must be a positive number"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer"),
        ({"sliding_window": 10**30}, "sliding_window must be at most"),
        ({"sliding_window": 8, "global_layers": [2]}, "global_layers must list layers from 0 to 1, none twice"),
        ({"sliding_window": 8, "global_layers": [0, 0]}, "none twice"),
        ({"sliding_window": 8, "global_layers": [True]}, "a list of layer numbers"),
        ({"sliding_window": 8, "global_layers": "0"}, "a list of layer numbers"),
        ({"global_layers": [0]}, "global_layers needs a sliding_window"),
        ({"rotary_dim": 3}, "an even rotary_dim up to head_dim, not 3"),
        ({"rotary_dim": 10}, "an even rotary_dim up to head_dim, not 10"),
        ({"position": "none", "rotary_dim": 4}, "rotary_dim needs position=rotary"),
        ({"position_offset": 2}, "position_offset needs position=learned"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": False}, "rope_scaling must be an object"),
        ({"rope_scaling": {"kind": "ntk", "factor": 2.0}}, "rope_scaling kind must be one of linear, llama3"),
        ({"rope_scaling": {**YARN, "beta_slow": 32}}, "in rope_scaling beta_slow must be less than beta_fast"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_scaling of kind yarn needs a rope_theta above 1, not 1.0"),
        ({"rope_scaling": {"kind": "linear"}}, "missing rope_scaling keys: factor"),
        ({"rope_scaling": {"kind": "linear", "factor": 2.0, "beta": 1}}, "unknown rope_scaling keys: beta"),
        ({"rope_scaling": {"kind": "linear", "factor": 2.0, "low_freq_factor": 1.0}}, "no parameter except factor"),
        ({"rope_scaling": {"kind": "llama3", "factor": 2.0}}, "rope_scaling low_freq_factor must be a positive"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor must be less than high_freq_factor"),
        ({"position": "relative_bias"}, "num_relative_buckets must be given for position=relative_bias"),
        ({"max_relative_distance": 8}, "max_relative_distance must not be given for position=rotary"),
        ({**RELATIVE, "num_relative_buckets": 1}, "num_relative_buckets must be at least 2"),
        ({**RELATIVE, "max_relative_distance": 4}, "max_relative_distance more than num_relative_buckets"),
        ({"attention": "average"}, "attention=average weights all tokens equally"),
        (
            {"attention": "average", "position": "none", "qk_norm": False, "score_soft_cap": 5.0},
            "without scores; remove qk_norm, score_scale and score_soft_cap",
        ),
        ({"score_soft_cap": 0}, "score_soft_cap must be a positive number"),
        ({"local_rope_theta": 500.0}, "local_rope_theta needs rotary positions and a sliding_window"),
        (
            {"position": "none", "sliding_window": 7, "local_rope_theta": 500.0},
            "local_rope_theta needs rotary positions and a sliding_window",
        ),
        ({"parallel_residual": True, "norm_placement": "both"}, "parallel_residual needs norm_placement=pre"),
        ({"norm": "layer_norm", "norm_unit_offset": True}, "norm_unit_offset needs norm=rms_norm"),
        ({"norm_bias": False}, "norm_bias=false needs norm=layer_norm"),
        ({"parallel_residual": True, "norm_placement": "post"}, "parallel_residual needs norm_placement=pre"),
        ({"shares_norm": True}, "shares_norm needs parallel_residual"),
        (
            {"qk_norm": False, "qk_norm_after_rotation": True},
            "qk_norm_after_rotation needs qk_norm and position=rotary",
        ),
        ({"score_growth": 0.1}, "the model's config has only one of score_growth and score_growth_interval"),
        (
            {"score_growth": 0.1, "score_growth_interval": 8, "rotary_dim": 4},
            "score_growth needs position=rotary, without rotary_dim and local_rope_theta",
        ),
        ({"unrotated_layers": [2]}, "unrotated_layers must list layers from 0 to 1, none twice"),
        ({"unrotated_layers": [0], "position": "none"}, "unrotated_layers needs position=rotary"),
        ({"rope_scaling": {**LONGROPE, "short_divisors": []}}, "short_divisors must be a list of positive numbers"),
        ({"rope_scaling": {**LONGROPE, "long_divisors": None}}, "long_divisors must be a list of positive numbers"),
        ({"rope_scaling": {**LONGROPE, "attention_factor": 0}}, "rope_scaling attention_factor must be a positive"),
        (
            {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_context_length": 16}, "rotary_dim": 2},
            "rope_scaling of kind dynamic needs more than two rotated dimensions",
        ),
        ({"rope_scaling": LONGROPE}, "short_divisors has length 3, but the model has 4 rotary"),
        ({"logit_divisor": 0.0}, "logit_divisor must be a positive number"),
        ({"global_head_dim": 16}, "global_head_dim=16 needs three things: an even value, local_rope_theta"),
        ({"sliding_window": 7, "local_rope_theta": 5.0, "global_head_dim": 9}, "global_head_dim=9 needs three things"),
        ({"value_norm": True, **DISENTANGLED}, "need attention=softmax and a position other than disentangled"),
        ({"kv_shared_mlp_size": 9}, "kv_shared_mlp_size needs num_kv_shared_layers"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers=2 leaves no earlier layer of the same kind"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers=3 leaves no earlier layer"),
        ({"num_kv_shared_layers": 1, "sliding_window": 7, "global_layers": [1]}, "leaves no earlier layer"),
        ({"layer_input_size": 8, "norm": "layer_norm"}, "layer_input_size needs norm=rms_norm"),
        (
            {"rope_scaling": {"kind": "proportional", "factor": 1.0, "rotated_fraction": 1.5}},
            "rotated_fraction must be at most 1, not 1.5",
        ),
        ({"qk_norm": 1}, "qk_norm must be true or false"),
        ({"colour": "red"}, "unknown model config keys: colour"),
    ],
)
def test_invalid_configs_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**ROTARY, **change})


def test_an_error_names_a_missing_key() -> None:
    with pytest.raises(ValueError, match="missing model config keys: vocab_size"):
        ModelConfig.from_dict({key: value for key, value in ROTARY.items() if key != "vocab_size"})


def test_kv_bytes_per_token_count_keys_and_values_of_all_layers() -> None:
    # keys and values, 2 layers, 2 kv heads, 8 numbers of 4 bytes
    assert VARIANTS["rotary-gqa"].kv_bytes_per_token(4) == 2 * 2 * 2 * 8 * 4
    # The last two of four layers read the keys and values of the first two, which have heads of 8 and of 16 numbers.
    shared = VARIANTS["gemma4"]
    assert [shared.kv_source(layer) for layer in range(4)] == [0, 1, 0, 1]
    assert shared.kv_bytes_per_token(4) == 2 * 2 * (8 + 16) * 4
    assert shared.kv_bytes_per_token(1) == 2 * 2 * (8 + 16 + 2 * 4)


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        VARIANTS["gpt2"].vocab_size = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"top_k": -1},
        {"max_tokens": -1},
        {"min_tokens": 11},
        {"seed": 2**64},
        {"stop": ("",)},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"stop_token_ids": tuple(range(129))},
    ],
)
def test_an_error_of_sampling_params_names_the_field(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change)).split("_")[-1]):
        SamplingParams(**{"max_tokens": 10, **change})
