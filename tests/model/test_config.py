"""ModelConfig and SamplingParams refuse what cannot work, and the shape table is the module's."""

import dataclasses
import math
from typing import Any

import pytest

from model.config import ModelConfig
from model.sampling_params import SamplingParams
from tests.model.configs import ROTARY, VARIANTS, build


@pytest.mark.parametrize("name", VARIANTS)
def test_parameter_shapes_are_the_modules(name: str) -> None:
    config = VARIANTS[name]
    state = {key: tuple(tensor.shape) for key, tensor in build(config).state_dict().items()}
    assert list(config.parameter_shapes().items()) == list(state.items())
    assert config.num_parameters == sum(math.prod(shape) for shape in state.values())


@pytest.mark.parametrize("name", VARIANTS)
def test_dictionary_round_trip(name: str) -> None:
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
        ({"qk_norm": 1}, "qk_norm must be true or false"),
        ({"colour": "red"}, "unknown model config keys: colour"),
    ],
)
def test_refuses_what_cannot_work(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**ROTARY, **change})


def test_names_a_missing_key() -> None:
    with pytest.raises(ValueError, match="missing model config keys: vocab_size"):
        ModelConfig.from_dict({key: value for key, value in ROTARY.items() if key != "vocab_size"})


def test_kv_bytes_per_token() -> None:
    # keys and values, 2 layers, 2 kv heads, 8 numbers of 4 bytes
    assert VARIANTS["rotary-gqa"].kv_bytes_per_token(4) == 2 * 2 * 2 * 8 * 4


def test_is_frozen() -> None:
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
def test_sampling_params_name_the_field(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change)).split("_")[-1]):
        SamplingParams(**{"max_tokens": 10, **change})
