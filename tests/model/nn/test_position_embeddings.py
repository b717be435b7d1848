"""Scores with rotary positions depend on the distance alone; learned positions act on the logits."""

import math

import pytest
import torch

from model.attention.metadata import AttentionMetadata
from model.nn.position_embeddings import RotaryPositions, rotate
from tests.model.configs import VARIANTS, build


def test_scores_of_rotated_queries_and_keys_depend_on_their_distance_alone() -> None:
    rotary = RotaryPositions(16, 10000.0, None)
    q, k = torch.randn(2, 1, 1, 16).unbind(0)

    def score(query_position: int, key_position: int) -> float:
        turned = [rotate(x, rotary(torch.tensor([p]))) for x, p in ((q, query_position), (k, key_position))]
        return float((turned[0] * turned[1]).sum())

    for distance in (0, 1, 7):
        assert score(distance, 0) == pytest.approx(score(90 + distance, 90), abs=1e-4)
    assert score(0, 0) == pytest.approx(float((q * k).sum()), abs=1e-5)


def test_rotation_is_the_complex_product_of_the_paper() -> None:
    """Compare with complex numbers: each pair (j, j + D/2) is multiplied by exp(i * position * theta^(-2j/D))."""
    theta, position, size = 500.0, 13, 8
    x = torch.randn(1, 1, size)
    turned = rotate(x, RotaryPositions(size, theta, None)(torch.tensor([position])))[0, 0].tolist()
    for pair in range(size // 2):
        angle = position * theta ** (-2 * pair / size)
        number = complex(float(x[0, 0, pair]), float(x[0, 0, pair + size // 2]))
        product = number * complex(math.cos(angle), math.sin(angle))
        assert turned[pair] == pytest.approx(product.real, abs=1e-5)
        assert turned[pair + size // 2] == pytest.approx(product.imag, abs=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_swapping_earlier_tokens_changes_the_logits(variant: str) -> None:
    """The logits of the last token change if two earlier tokens are swapped."""
    model = build(VARIANTS[variant])
    metadata = AttentionMetadata.uncached((4,))
    straight, swapped = (model(torch.tensor(ids), metadata, None)[-1] for ids in ([1, 2, 3, 4], [2, 1, 3, 4]))
    assert not torch.allclose(straight, swapped, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_tokens_do_not_change_earlier_logits(variant: str) -> None:
    model = build(VARIANTS[variant])
    short = model(torch.tensor([1, 2, 3]), AttentionMetadata.uncached((3,)), None)
    longer = model(torch.tensor([1, 2, 3, 9, 8]), AttentionMetadata.uncached((5,)), None)
    torch.testing.assert_close(longer[:3], short, atol=1e-5, rtol=1e-5)


def test_forward_rejects_inconsistent_arguments() -> None:
    model = build(VARIANTS["gpt2"])
    with pytest.raises(ValueError, match=r"must have the same shape \(num_tokens,\)"):
        model(torch.tensor([1, 2]), AttentionMetadata.uncached((3,)), None)
    paged = AttentionMetadata(
        query_lengths=(1,),
        context_lengths=(1,),
        positions_T=torch.tensor([0]),
        slot_mapping_T=torch.tensor([0]),
        block_tables_BN=torch.tensor([[0]]),
    )
    with pytest.raises(ValueError, match="give a KV-cache and metadata with slot_mapping_T"):
        model(torch.tensor([1]), paged, None)
