"""The kernels for sampling give what PyTorch's operations give: in Triton's interpreter, on the CPU."""

from typing import Any

import numpy as np
import pytest
import torch

from model.sampling.logits_processors import mask_logits
from model.sampling.sampler import _nucleus_floor
from model.system.triton_modules import import_with_triton
from tests.model.gpu.test_fused_modules import interpret

pytestmark = pytest.mark.triton


def test_the_kernel_keeps_the_tokens_that_a_sort_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    sampling_kernels: Any = import_with_triton("model.gpu.sampling_kernels")
    monkeypatch.setattr(sampling_kernels, "_TILE", 1024)
    generator = torch.Generator().manual_seed(3)
    spread_B1 = torch.tensor([[0.1], [1.0], [4.0], [0.5]])
    probs_BV = (spread_B1 * torch.randn((4, 2000), generator=generator)).softmax(-1)
    probs_BV[3] = 1 / 2000  # all tokens are equally likely
    top_p_B1 = torch.tensor([[0.9], [0.5], [0.999], [0.3]])
    expected_B1 = _nucleus_floor(probs_BV, top_p_B1)
    floor_B1 = torch.full((4, 1), -1.0)
    floor_B1[1] = 0.25  # known already
    found_B1 = sampling_kernels.complete_floors(probs_BV, top_p_B1 * probs_BV.sum(-1, keepdim=True), floor_B1)
    assert found_B1.tolist() == [*expected_B1[:1].tolist(), [0.25], *expected_B1[2:].tolist()]


def test_grammar_masks_equal_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a vocabulary that the head pads, and one row without a grammar."""
    interpret(monkeypatch)
    sampling_kernels: Any = import_with_triton("model.gpu.sampling_kernels")
    logits_BV = torch.randn((3, 5008), generator=torch.Generator().manual_seed(4))[:, :5001]
    words_RW = torch.from_numpy(np.random.default_rng(5).integers(-(2**31), 2**31, (2, 157), dtype=np.int32))
    masked_BV = sampling_kernels.masked(logits_BV, torch.tensor([1, -1, 0]), words_RW)
    assert masked_BV.tolist() == mask_logits(logits_BV, (0, 2), words_RW[[1, 0]]).tolist()
    assert masked_BV[1].isfinite().all()
    assert 2000 < masked_BV[0].isinf().sum() < 3000
