"""Muon equals torch's in bfloat16, and orthogonalizes in float32 too."""

import pytest
import torch

from model.training.optimizer import Muon, orthogonalize


def matrices() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in ((24, 16), (16, 40), (8, 8))]


def test_updates_in_bfloat16_equal_those_of_torch() -> None:
    ours, theirs = matrices(), matrices()
    ours.append(torch.nn.Parameter(torch.ones(2, 2)))  # without a gradient
    optimizers = (
        Muon(ours, lr=0.02, weight_decay=0.1, dtype=torch.bfloat16),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=False):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=False):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    assert ours[-1].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("size", [(24, 16), (16, 40), (8, 8)])
def test_an_orthogonalized_matrix_has_its_singular_vectors_and_values_near_one(size: tuple[int, int]) -> None:
    matrix = torch.randn(size, generator=torch.Generator().manual_seed(3))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    result = left.T @ orthogonalize(matrix) @ right.T
    values = result.diagonal()
    assert (values - 0.95).abs().max() < 0.3
    torch.testing.assert_close(result, values.diag(), rtol=0, atol=1e-4)
    assert orthogonalize(torch.zeros(4, 3)).abs().max() == 0
