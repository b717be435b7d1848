"""Rotary frequencies of public checkpoints equal those of the transformers library bit for bit.

One ulp of a frequency is an angle of 0.01 at position 131,071, which small models and short texts would not show.
"""

import copy
import importlib
from typing import Any

import pytest
import torch

from model.config import ModelConfig
from model.config_enums import PositionKind
from model.nn.position_embeddings import RotaryPositions
from tests.families.models import CLASSES, transformers
from tests.families.public_configs import PUBLISHED, read_published

# Models with two rotary embeddings: names of the library's classes, without `Config` and `RotaryEmbedding`.
CLASSES_OF_TWO_ROPES = {
    "gemma3": ("Gemma3Text", "Gemma3"),
    "gemma4": ("Gemma4Text", "Gemma4Text"),
    "olmo3": ("Olmo3", "Olmo3"),
}
CONFIGS = {entry["name"]: read_published(entry)[0] for entry in PUBLISHED}


def _rope(config: ModelConfig) -> tuple[object, ...]:
    return config.rotary_size, config.rope_theta, config.rope_scaling, config.max_context_length


def has_two_ropes(values: dict[str, Any]) -> bool:
    return values["model_type"].startswith(tuple(CLASSES_OF_TWO_ROPES))


# One model of each rotary embedding that differs in a number.
ROTARY = list(
    {
        (entry["config"]["model_type"], _rope(CONFIGS[entry["name"]])): entry["name"]
        for entry in PUBLISHED
        if CONFIGS[entry["name"]].position is PositionKind.ROTARY and not has_two_ropes(entry["config"])
    }.values()
)
TWO_ROPES = [name for name, config in CONFIGS.items() if config.local_rope_theta is not None]


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_frequencies_equal_those_of_transformers_bitwise(name: str) -> None:
    (values,) = (entry["config"] for entry in PUBLISHED if entry["name"] == name)
    config, values = CONFIGS[name], values.get("text_config", values)
    model_type = values.get("model_type", "mistral")
    class_name, _ = CLASSES[model_type]
    own = {key: value for key, value in values.items() if key not in ("model_type", "architectures")}
    library_config = getattr(transformers, f"{class_name}Config")(**copy.deepcopy(own))
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    theirs = getattr(module, f"{class_name}RotaryEmbedding")(library_config)
    form = config.rotary_size, config.rope_theta, config.rope_scaling
    ours = RotaryPositions(*form, max_context_length=config.max_context_length)
    last = torch.tensor([config.max_context_length - 1])
    theirs(torch.zeros(1), last[None])  # LongRoPE changes the frequencies at a position beyond the original context
    assert torch.equal(ours.frequencies, theirs.inv_freq)
    for mine, reference in zip(ours(last), theirs(torch.zeros(1), last[None]), strict=True):
        stored = mine.view(2, -1).t() if model_type == "cohere" else mine  # Cohere's tables have pairs of equal numbers
        assert torch.equal(stored.flatten(), reference.flatten())


@pytest.mark.parametrize("name", TWO_ROPES)
def test_both_rotary_frequencies_equal_those_of_transformers_bitwise(name: str) -> None:
    (values,) = (entry["config"] for entry in PUBLISHED if entry["name"] == name)
    config = CONFIGS[name]
    own = copy.deepcopy(values.get("text_config", values))
    module_name = values["model_type"].removesuffix("_text")
    config_class, rope_class = CLASSES_OF_TWO_ROPES[module_name]
    make_config = getattr(transformers, f"{config_class}Config")
    library_config = make_config(**{key: own[key] for key in own if key != "model_type"})
    module = importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    theirs = getattr(module, f"{rope_class}RotaryEmbedding")(library_config)
    assert config.local_rope_theta is not None
    whole = RotaryPositions(config.global_head_dim or config.rotary_size, config.rope_theta, config.rope_scaling)
    local = RotaryPositions(config.rotary_size, config.local_rope_theta, None)
    assert torch.equal(whole.frequencies, theirs.full_attention_inv_freq)
    assert torch.equal(local.frequencies, theirs.sliding_attention_inv_freq)
    assert (whole.factor, local.factor) == (theirs.full_attention_attention_scaling, 1.0)
