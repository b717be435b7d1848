"""Replacement of a model's parts by fused GPU kernels, tested on a CPU with fake kernels."""

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from model.attention.metadata import AttentionMetadata
from model.gpu.fused_modules import fuse
from model.nn.layers import RMSNorm, rms_norm
from model.nn.position_embeddings import rotate_each
from model.nn.transformer import Transformer
from tests.model.configs import VARIANTS, build

CALLS: list[str] = []


def norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    CALLS.append("norm")
    return functional.rms_norm(x.float(), x.shape[-1:], weight.float() + unit_offset, eps).to(x.dtype)


def rotation(q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    CALLS.append("rotation")
    return rotate_each(q, k, angles)


def product(gate_up: Tensor) -> Tensor:
    CALLS.append("product")
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


@pytest.fixture(autouse=True)
def _fake_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: Any = SimpleNamespace(rms_norm=norm, rotate_pair=rotation, silu_product=product)
    monkeypatch.setitem(sys.modules, "model.gpu.fused_kernels", kernels)
    CALLS.clear()


def logits(model: Transformer) -> Tensor:
    return model(torch.arange(20), AttentionMetadata.uncached((20,)), None)


@pytest.mark.parametrize("variant", ["rotary-gqa", "rotary-partial", "gemma", "olmo2", "gpt2", "qwen2"])
def test_a_fused_model_computes_the_same(variant: str) -> None:
    model = build(VARIANTS[variant])
    names = list(model.state_dict())
    expected = logits(model)
    fuse(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names
    used = {"gpt2": set(), "gemma": {"norm", "rotation"}}.get(variant, {"norm", "rotation", "product"})
    assert set(CALLS) == used
    if variant == "rotary-gqa":  # two norms per layer, two for queries and keys, and the final norm
        assert [CALLS.count(name) for name in ("norm", "rotation", "product")] == [2 * 4 + 1, 2, 2]


def test_without_triton_or_in_float64_the_model_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    fuse(double := build(VARIANTS["rotary-gqa"]).double())
    monkeypatch.setitem(cast(dict[str, Any], sys.modules), "model.gpu.fused_kernels", None)
    fuse(single := build(VARIANTS["rotary-gqa"]))
    for model in (double, single):
        assert {module.normalize for module in model.modules() if isinstance(module, RMSNorm)} == {rms_norm}
