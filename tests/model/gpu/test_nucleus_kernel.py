"""The kernel for top_p keeps the tokens that a sort keeps: in Triton's interpreter, on the CPU."""

from typing import Any

import pytest
import torch

from model.sampling.sampler import _nucleus_floor
from model.system.triton_modules import import_with_triton
from tests.model.gpu.test_fused_modules import interpret


@pytest.mark.triton
def test_the_kernel_keeps_the_tokens_that_a_sort_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    nucleus_kernel: Any = import_with_triton("model.gpu.nucleus_kernel")
    monkeypatch.setattr(nucleus_kernel, "_TILE", 1024)
    generator = torch.Generator().manual_seed(3)
    spread_B1 = torch.tensor([[0.1], [1.0], [4.0], [0.5]])
    probs_BV = (spread_B1 * torch.randn((4, 2000), generator=generator)).softmax(-1)
    probs_BV[3] = 1 / 2000  # all tokens are equally likely
    top_p_B1 = torch.tensor([[0.9], [0.5], [0.999], [0.3]])
    expected_B1 = _nucleus_floor(probs_BV, top_p_B1)
    floor_B1 = torch.full((4, 1), -1.0)
    floor_B1[1] = 0.25  # known already
    found_B1 = nucleus_kernel.complete_floors(probs_BV, top_p_B1 * probs_BV.sum(-1, keepdim=True), floor_B1)
    assert found_B1.tolist() == [*expected_B1[:1].tolist(), [0.25], *expected_B1[2:].tolist()]
