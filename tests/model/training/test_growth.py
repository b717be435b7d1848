"""Growth of models: a larger model computes the logits of the smaller one, and all its new weights can learn."""

import re
from typing import Any

import pytest
import torch

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.config import ModelConfig
from model.nn.transformer import Transformer
from model.training.growth import check_growth, grow
from tests.model.configs import EXPERTS, GEMMA, GPT2, NEOX, ROTARY

AVERAGE = {"attention": "average", "position": "learned", "qk_norm": False}


def pair(**changes: Any) -> tuple[Transformer, ModelConfig]:
    """Return a model with random weights and biases, and the config of one with more layers and wider MLPs."""
    smaller = ModelConfig.from_dict({**ROTARY, **changes})
    larger = ModelConfig.from_dict({**ROTARY, **changes, "num_layers": 5, "mlp_size": 80})
    model = Transformer(smaller, ATTENTION_BACKENDS["sdpa"])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model, larger


@pytest.mark.parametrize("changes", [{}, GPT2, NEOX, AVERAGE, {"mlp": "geglu", "mlp_bias": True}])
def test_a_grown_model_has_the_logits_of_the_smaller_one(changes: dict[str, Any]) -> None:
    model, config = pair(**changes)
    check_growth(model.config, config)
    larger = Transformer(config, ATTENTION_BACKENDS["sdpa"])
    larger.load_state_dict(grow(model.state_dict(), model.config, config, seed=3))
    tokens = torch.arange(3, 43)
    metadata = AttentionMetadata.uncached((40,), "cpu")
    expected = model(tokens, metadata, None)
    torch.testing.assert_close(larger(tokens, metadata, None), expected, rtol=1e-5, atol=1e-5)


def test_layers_are_copies_and_added_weights_can_learn() -> None:
    model, config = pair()
    weights = grow(model.state_dict(), model.config, config, seed=3)
    assert list(weights) == list(config.parameter_shapes())
    for layer, copied in enumerate((0, 0, 0, 1, 1)):
        qkv = f"layers.{layer}.attention.qkv.weight"
        torch.testing.assert_close(weights[qkv], model.state_dict()[f"layers.{copied}.attention.qkv.weight"])
    assert [layer for layer in range(5) if weights[f"layers.{layer}.mlp.down.weight"].any()] == [0, 3]
    larger = Transformer(config, ATTENTION_BACKENDS["sdpa"])
    larger.load_state_dict(weights)
    larger(torch.arange(40), AttentionMetadata.uncached((40,), "cpu"), None).square().sum().backward()
    for layer in range(5):
        for name in ("attention.out", "mlp.down"):
            gradient = larger.get_parameter(f"layers.{layer}.{name}.weight").grad
            assert gradient is not None
            assert gradient.any()
    added = larger.get_parameter("layers.0.mlp.gate_up.weight").unflatten(0, (2, 80))[:, 48:]
    assert added.abs().min(dim=-1).values.max() > 0
    again = grow(model.state_dict(), model.config, config, seed=3)
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())
    other = grow(model.state_dict(), model.config, config, seed=4)
    assert not torch.equal(weights["layers.0.mlp.gate_up.weight"], other["layers.0.mlp.gate_up.weight"])


@pytest.mark.parametrize(
    ("ours", "theirs", "error"),
    [
        ({"hidden_size": 40}, {}, "its hidden_size is 32, the recipe's 40; give both models equal values"),
        ({"num_layers": 1}, {}, "its num_layers is 2, the recipe's 1; a model can only grow"),
        ({"mlp_size": 32}, {}, "its mlp_size is 48, the recipe's 32; a model can only grow"),
        ({"num_layers": 3}, {"experts": EXPERTS}, "a model with its experts cannot grow"),
        ({"mlp_size": 64}, GEMMA, "a model with its norm_placement cannot grow"),
    ],
)
def test_growth_that_would_change_the_logits_is_rejected(
    ours: dict[str, Any], theirs: dict[str, Any], error: str
) -> None:
    smaller = ModelConfig.from_dict({**ROTARY, **theirs})
    with pytest.raises(ValueError, match=re.escape(error)):
        check_growth(smaller, ModelConfig.from_dict({**ROTARY, **theirs, **ours}))
    check_growth(smaller, smaller)
