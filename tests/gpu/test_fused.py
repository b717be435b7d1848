"""Fused kernels on a CUDA device: equal to PyTorch for any sizes, alone and in whole models."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from model.attention.metadata import AttentionMetadata
from model.gpu.fused_modules import fuse
from model.nn.layers import RMSNorm, rms_norm
from model.nn.position_embeddings import RotaryPositions, rotate_each
from model.system.triton_modules import import_with_triton
from tests.model.configs import VARIANTS, build

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])]

# None without Triton. Devices that run these tests have Triton.
fused_kernels: Any = import_with_triton("model.gpu.fused_kernels")
# Allowed error by dtype, relative to the largest number: a sum in another order may round to the neighbouring value.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


def silu_product(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


@torch.inference_mode()
def compare(fused: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Check that a fused kernel equals the plain computation up to rounding."""
    found, expected = fused(x).float(), plain(x).float()
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    assert error <= TOLERANCES[x.dtype]


@pytest.mark.parametrize("size", [1, 48, 128, 384, 1536, 8192])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_the_fused_norm_equals_rms_norm(dtype: torch.dtype, size: int, unit_offset: bool) -> None:
    norm = RMSNorm(size, 1e-6, unit_offset=unit_offset).to("cuda", dtype).requires_grad_(False)
    norm.weight.normal_()
    x = torch.randn((7, 3, 2 * size), device="cuda").to(dtype)[..., :size]
    compare(lambda x: fused_kernels.rms_norm(x, norm.weight, norm.eps, unit_offset), norm, x)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotated"), [(12, 2, 128, 128), (4, 4, 20, 8), (3, 1, 80, 32), (8, 8, 64, 64)]
)
def test_the_fused_rotation_equals_pytorchs_for_slices_of_one_matrix(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, rotated: int
) -> None:
    rotation = RotaryPositions(rotated, 1e4, None).to("cuda")(torch.arange(100, 170, device="cuda"))
    sizes = [heads * size, kv_heads * size, kv_heads * size]
    q, k, _ = torch.randn((70, sum(sizes)), device="cuda").to(dtype).split(sizes, dim=-1)
    q, k = q.unflatten(-1, (heads, size)), k.unflatten(-1, (kv_heads, size))
    found, expected = fused_kernels.rotate_pair(q, k, rotation), rotate_each(q, k, rotation)
    for ours, theirs in zip(found, expected, strict=True):
        compare(lambda x: x, partial(lambda x, result: result, result=theirs), ours)


@pytest.mark.parametrize("size", [1, 48, 1024, 1500, 8960])
def test_the_fused_activation_equals_pytorchs(dtype: torch.dtype, size: int) -> None:
    compare(fused_kernels.silu_product, silu_product, torch.randn((9, 2 * size), device="cuda").to(dtype))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fused_model_computes_the_same(dtype: torch.dtype, variant: str) -> None:
    model = build(VARIANTS[variant]).to("cuda", dtype)
    ids, metadata = torch.arange(40, device="cuda"), AttentionMetadata.uncached((40,), "cuda")
    expected = model(ids, metadata, None)
    fuse(model)
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert all(norm.normalize is not rms_norm for norm in norms)
    assert bool(norms) == (variant not in ("gpt2", "neox", "gpt2-no-bias"))
    tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-5
    assert (model(ids, metadata, None) - expected).abs().max() <= tolerance * expected.abs().max()
