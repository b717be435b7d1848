"""Fused kernels on a CUDA device: equal to PyTorch for any sizes, alone and in whole models."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.gpu.fused_modules import fuse
from model.nn.layers import LayerNorm, Norm, RMSNorm
from model.system.triton_modules import import_with_triton
from tests.model.configs import VARIANTS, attention_layers, build

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
@pytest.mark.parametrize(
    "norm",
    [
        partial(RMSNorm, eps=1e-6),
        partial(RMSNorm, eps=1e-6, unit_offset=True),
        partial(LayerNorm, eps=1e-5, bias=True),
        partial(LayerNorm, eps=1e-5, bias=False),
    ],
)
def test_the_fused_norm_equals_pytorchs(dtype: torch.dtype, size: int, norm: Callable[[int], Norm]) -> None:
    module = norm(size).to("cuda", dtype).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_()
    x, added = torch.randn((2, 21, 2 * size), device="cuda").to(dtype)[..., :size]
    for other in (None, added):
        expected = module.add(x, other)
        for part, theirs in zip(fused_kernels.add_norm(module, x, other), expected, strict=True):
            compare(lambda part: part, partial(lambda _, theirs: theirs, theirs=theirs), part)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("variant", ["rotary-gqa", "hunyuan", "neox", "olmo2", "gpt2", "gemma4"])
def test_the_fused_rotation_and_cache_equal_pytorchs(
    dtype: torch.dtype, variant: str, cache_dtype: torch.dtype | None
) -> None:
    model = build(VARIANTS[variant]).to("cuda", dtype)
    attention, count = attention_layers(model)[0], 70
    rotary = model.local_rotary if attention.rotates_locally else model.rotary
    rotation = None if rotary is None else rotary(torch.arange(100, 170, device="cuda"))
    heads = [size // attention.head_dim for size in attention.sizes]
    parts = torch.randn((count, sum(attention.sizes)), device="cuda").to(dtype).split(attention.sizes, dim=-1)
    q, k, v = (part.unflatten(-1, (number, -1)) for part, number in zip(parts, heads, strict=True))
    slots = torch.randperm(80, device="cuda")[:count]
    caches = [
        KVCache(model.config, num_blocks=10, block_size=8, dtype=dtype, device="cuda", cache_dtype=cache_dtype)
        for _ in range(2)
    ]
    expected, turned_k = attention.rotated(q, k, rotation)
    caches[0].write(0, slots, turned_k, v)
    found = fused_kernels.rotate_and_write(attention, q, k, v, rotation, slots, caches[1])
    theirs = (expected, turned_k, *caches[0].gather(0, slots))
    for part, other in zip((*found, *caches[1].gather(0, slots)), theirs, strict=True):
        error = (part.float() - other.float()).abs().max() / other.float().abs().max()
        assert error <= (TOLERANCES[dtype] if cache_dtype is None else 1e-2)


@pytest.mark.parametrize("size", [1, 48, 1024, 1500, 8960])
def test_the_fused_activation_equals_pytorchs(dtype: torch.dtype, size: int) -> None:
    compare(fused_kernels.silu_product, silu_product, torch.randn((9, 2 * size), device="cuda").to(dtype))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fused_model_computes_the_same(dtype: torch.dtype, variant: str) -> None:
    model = build(VARIANTS[variant]).to("cuda", dtype)
    ids, metadata = torch.arange(40, device="cuda"), AttentionMetadata.uncached((40,), "cuda")
    expected = model(ids, metadata, None)
    fuse(model)
    assert all(module.fused is not None for module in model.modules() if isinstance(module, Norm))
    tolerance = 5e-2 if dtype is torch.bfloat16 else 1e-5
    assert (model(ids, metadata, None) - expected).abs().max() <= tolerance * expected.abs().max()
