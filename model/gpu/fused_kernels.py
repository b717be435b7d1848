"""Fused Triton kernels for the operations between a model's matrix products. Needs triton and a GPU.

In PyTorch each of these operations takes three to seven kernels. The fused kernels round at the same steps.

Legend: T packed tokens, E hidden size, H query heads, K key/value heads, D head dimension, R rotated dimensions,
F feed-forward size, N rows.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEED_FORWARD_TILE = 1024


def rms_norm(x: Tensor, weight_E: Tensor, eps: float, unit_offset: bool) -> Tensor:
    """Apply an RMS norm to the last dimension, as `model.nn.layers.rms_norm` does."""
    size = x.shape[-1]
    x_NE = x.reshape(-1, size)
    if x_NE.stride(1) != 1:
        x_NE = x_NE.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(size)
    _rms_norm[(len(x_NE),)](
        x_NE, weight_E, out, x_NE.stride(0), eps, SIZE=size, PADDED=padded, UNIT_OFFSET=unit_offset,
        num_warps=min(8, max(1, padded // 256)),
    )  # fmt: skip
    return out


def rotate_pair(q_THD: Tensor, k_TKD: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys as `model.nn.position_embeddings.rotate` does, in one kernel."""
    cos_T1R, sin_T1R = rotation
    num_tokens, num_heads, size = q_THD.shape
    num_kv_heads = k_TKD.shape[1]
    q_THD, k_TKD = (x if x.stride(2) == 1 else x.contiguous() for x in (q_THD, k_TKD))
    turned_q, turned_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_TKD))
    _rotate_pair[(num_tokens, num_heads + num_kv_heads)](
        q_THD, k_TKD, cos_T1R, sin_T1R, turned_q, turned_k,
        q_THD.stride(0), q_THD.stride(1), k_TKD.stride(0), k_TKD.stride(1),
        HEADS=num_heads, KV_HEADS=num_kv_heads, SIZE=size, ROTATED=cos_T1R.shape[-1],
        PADDED=triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip
    return turned_q, turned_k


def silu_product(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up from (..., 2F), gate and up side by side, to (..., F)."""
    size = gate_up.shape[-1] // 2
    flat_T2F = gate_up.reshape(-1, 2 * size)
    if flat_T2F.stride(1) != 1:
        flat_T2F = flat_T2F.contiguous()
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_product[(len(flat_T2F), triton.cdiv(size, _FEED_FORWARD_TILE))](
        flat_T2F, out, flat_T2F.stride(0), SIZE=size, TILE=_FEED_FORWARD_TILE, num_warps=4
    )
    return out


@triton.jit
def _rms_norm(
    x, weight, out, stride, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, UNIT_OFFSET: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    real = columns < SIZE
    numbers = tl.load(x + row * stride + columns, mask=real, other=0.0).to(tl.float32)
    weights = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weights = weights + 1.0
    scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)
    tl.store(out + row * SIZE + columns, (numbers * scale * weights).to(out.dtype.element_ty), mask=real)


@triton.jit
def _rotate_pair(
    q, k, cosines, sines, turned_q, turned_k, q_stride, q_head_stride, k_stride, k_head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, PADDED)
    real, rotated = columns < SIZE, columns < ROTATED
    # A number's partner is half of the rotated dimensions away. In the first half the partner is subtracted.
    first = columns < ROTATED // 2
    partners = tl.where(first, columns + ROTATED // 2, columns - ROTATED // 2)
    cosine = tl.load(cosines + token * ROTATED + columns, mask=rotated, other=1.0)
    sine = tl.load(sines + token * ROTATED + columns, mask=rotated, other=0.0)
    sine = tl.where(first, -sine, sine)
    if head < HEADS:
        source = q + token * q_stride + head * q_head_stride
        target = turned_q + (token * HEADS + head) * SIZE
        own = tl.load(source + columns, mask=real, other=0.0).to(tl.float32)
        other = tl.load(source + partners, mask=rotated, other=0.0).to(tl.float32)
        tl.store(target + columns, (own * cosine + other * sine).to(turned_q.dtype.element_ty), mask=real)
    else:
        source = k + token * k_stride + (head - HEADS) * k_head_stride
        target = turned_k + (token * KV_HEADS + head - HEADS) * SIZE
        own = tl.load(source + columns, mask=real, other=0.0).to(tl.float32)
        other = tl.load(source + partners, mask=rotated, other=0.0).to(tl.float32)
        tl.store(target + columns, (own * cosine + other * sine).to(turned_k.dtype.element_ty), mask=real)


@triton.jit
def _silu_product(gate_up, out, stride, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = columns < SIZE
    gate = tl.load(gate_up + row * stride + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + columns, mask=real, other=0.0).to(tl.float32)
    # silu is rounded to the dtype before the product, as in PyTorch
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + columns, (silu * up).to(out.dtype.element_ty), mask=real)
