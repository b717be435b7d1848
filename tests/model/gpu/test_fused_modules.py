"""Selection of fused GPU kernels, tested on a CPU with stand-ins: only kernels that pass their check are used."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from model.attention.metadata import AttentionMetadata
from model.gpu import fused_modules
from model.gpu.fused_modules import compare, fuse, silu_product
from model.nn.position_embeddings import rotate_each
from model.nn.transformer import Transformer
from tests.model.configs import VARIANTS, build

CALLS: list[str] = []


def norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    CALLS.append("norm")
    return rms_norm(x.float(), x.shape[-1:], weight.float() + unit_offset, eps).to(x.dtype)


def rotation(q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    CALLS.append("rotation")
    return rotate_each(q, k, angles)


def product(gate_up: Tensor) -> Tensor:
    CALLS.append("product")
    return silu_product(gate_up)


def failing(*inputs: Any) -> Any:
    raise RuntimeError("ptxas was not found\nat all")


def stand_ins(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"rms_norm": norm, "rotate_pair": rotation, "silu_product": product, **changed})


@pytest.fixture(autouse=True)
def _a_gpu_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU stand for the GPU."""
    monkeypatch.setattr(fused_modules, "DEVICE", "cpu")
    CALLS.clear()


def logits(model: Transformer) -> Tensor:
    return model(torch.arange(20), AttentionMetadata.uncached((20,)), None)


@pytest.mark.parametrize("variant", ["rotary-gqa", "rotary-partial", "gemma", "olmo2", "gpt2", "qwen2"])
def test_a_fused_model_computes_the_same(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_modules, "fused_kernels", stand_ins())
    model = build(VARIANTS[variant])
    names = list(model.state_dict())
    expected = logits(model)
    assert fuse(model) == ()
    CALLS.clear()
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == names
    used = {"gpt2": set(), "gemma": {"norm", "rotation"}}.get(variant, {"norm", "rotation", "product"})
    assert set(CALLS) == used
    if variant == "rotary-gqa":  # two norms per layer, two for queries and keys, and the final norm
        assert [CALLS.count(name) for name in ("norm", "rotation", "product")] == [2 * 4 + 1, 2, 2]


def test_what_fails_or_differs_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*inputs: Any) -> Tensor:
        return norm(*inputs) + 0.1

    def endless(gate_up: Tensor) -> Tensor:
        return product(gate_up) * torch.nan

    monkeypatch.setattr(
        fused_modules, "fused_kernels", stand_ins(rms_norm=shifted, rotate_pair=failing, silu_product=endless)
    )
    model = build(VARIANTS["rotary-gqa"])
    expected = logits(model)
    norms, rotated, products = fuse(model)
    assert norms.startswith("fused norms: differs by ")
    assert rotated == "fused rotation: ptxas was not found"
    assert products == "fused gated MLPs: differs by nan of the largest number"
    assert torch.equal(logits(model), expected)


def test_without_triton_a_gpu_or_a_dtype_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(VARIANTS["rotary-gqa"])
    monkeypatch.setattr(fused_modules, "fused_kernels", None)
    assert fuse(model) == ("fused kernels: triton is not installed",)
    monkeypatch.setattr(fused_modules, "fused_kernels", stand_ins(rms_norm=failing))
    assert fuse(model.double()) == ("fused kernels: not for torch.float64 on cpu",)
    monkeypatch.setattr(fused_modules, "DEVICE", "cuda")
    assert fuse(model.float()) == ("fused kernels: not for torch.float32 on cpu",)


def test_a_comparison_takes_rounding_and_no_more() -> None:
    x = torch.randn(5, 64).bfloat16()
    compare(lambda x: x * 1.004, lambda x: x, x)
    with pytest.raises(ValueError, match=r"differs by 1\.0e-01 of the largest number"):
        compare(lambda x: x * 1.1, lambda x: x, x.float())
