"""Rotary frequencies of public checkpoints equal those of the transformers library bit for bit.

One ulp of a frequency is an angle of 0.01 at position 131,071, which small models and short texts would not show.
"""

import copy
import importlib
from pathlib import Path

import pytest
import torch

from model.config_enums import PositionKind
from model.huggingface.family_table import read_family_config
from model.nn.position_embeddings import RotaryPositions
from tests.families.models import CLASSES, transformers
from tests.families.public_configs import PUBLIC

# Names of the library's module and of its class of rotary embeddings.
TWO_ROPES = {"gemma3": "Gemma3RotaryEmbedding", "gemma4": "Gemma4TextRotaryEmbedding"}
GEMMA = [name for name, (_, values) in PUBLIC.items() if values["model_type"].startswith(tuple(TWO_ROPES))]
ROTARY = [name for name, (_, values) in PUBLIC.items() if values["model_type"] != "gpt2" and name not in GEMMA]


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_frequencies_equal_those_of_transformers_bitwise(name: str) -> None:
    _, values = PUBLIC[name]
    _, config = read_family_config(Path("config.json"), values)
    assert config.position is PositionKind.ROTARY
    model_type = values["model_type"]
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
        assert torch.equal(mine.flatten(), reference.flatten())


@pytest.mark.parametrize("name", GEMMA)
def test_both_rotary_frequencies_of_gemma_equal_those_of_transformers_bitwise(name: str) -> None:
    _, values = PUBLIC[name]
    _, config = read_family_config(Path("config.json"), values)
    own = copy.deepcopy(values.get("text_config", values))
    family = values["model_type"].removesuffix("_text")
    make_config = getattr(transformers, f"{family.capitalize()}TextConfig")
    library_config = make_config(**{key: own[key] for key in own if key != "model_type"})
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = getattr(module, TWO_ROPES[family])(library_config)
    assert config.local_rope_theta is not None
    whole = RotaryPositions(config.global_head_dim or config.rotary_size, config.rope_theta, config.rope_scaling)
    local = RotaryPositions(config.rotary_size, config.local_rope_theta, None)
    assert torch.equal(whole.frequencies, theirs.full_attention_inv_freq)
    assert torch.equal(local.frequencies, theirs.sliding_attention_inv_freq)
