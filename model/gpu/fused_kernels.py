"""Fused Triton kernels for the operations between a model's matrix products. Needs triton and a GPU.

In PyTorch each of these operations takes two to thirty kernels. The fused kernels round at the same steps.

Legend: T packed tokens, E hidden size, H query heads, K key/value heads, D head dimension, R rotated dimensions,
F feed-forward size, N rows.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.gpu.quantized_kernels import store_quantized
from model.nn.layers import LayerNorm, Norm, RMSNorm
from model.nn.transformer import Attention, Rotation
from model.system.dependent_launch import begin, launch_options

_FEED_FORWARD_TILE = 1024
_LARGEST_QUANTIZED = 16_384
_TINY = tl.constexpr(1e-30)  # as in `model.attention.kv_cache.quantized`
_FLOAT16_MAX = tl.constexpr(65504.0)
# A float32 number of at most 2^22, plus this, is rounded to a whole number, ties to even.
_ROUNDER = tl.constexpr(12582912.0)


def add_norm(norm: Norm, x: Tensor, added: Tensor | None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Add and normalize, as `Norm.add` does, in one kernel. dtype: as for `_quantized`."""
    size = x.shape[-1]
    x_NE = x.reshape(-1, size)
    added_NE = None if added is None else added.reshape(-1, size)
    total = x if added is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(size)
    numbers_NE, scale_N = _quantized(out, dtype)
    _add_norm[(len(x_NE),)](
        x_NE, added_NE, norm.weight, norm.bias if isinstance(norm, LayerNorm) else None, total, out,
        numbers_NE, scale_N, x_NE.stride(0), 0 if added_NE is None else added_NE.stride(0), norm.eps,
        SIZE=size, PADDED=padded, IS_CENTERED=isinstance(norm, LayerNorm),
        UNIT_OFFSET=isinstance(norm, RMSNorm) and norm.unit_offset,
        num_warps=min(8, max(1, padded // 256)), **launch_options(x.device),
    )  # fmt: skip
    return total, out


def rotate_and_write(
    attention: Attention,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    rotation: Rotation | None,
    slots_T: Tensor,
    kv_cache: KVCache,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate queries and keys in place, write keys and values to the KV-cache, in one kernel.

    As `Attention.rotated`, whose result is returned, and `KVCache.write` do. A norm over all heads at once is computed
    before, by itself.
    """
    query_norm, key_norm, layer = attention.query_norm, attention.key_norm, attention.form.layer
    if not attention.norms_heads:
        q_THD, k_TKD = attention.rotated(q_THD, k_TKD, None)
        query_norm = key_norm = None
    num_tokens, num_heads, size = q_THD.shape
    num_kv_heads = k_TKD.shape[1]
    if rotation is None and query_norm is None:
        num_heads = 0
    if num_heads + num_kv_heads == 0:
        return q_THD, k_TKD
    cos_T1R, sin_T1R = (None, None) if rotation is None else rotation
    is_int8 = kv_cache.cache_dtype is torch.int8
    _rotate_and_write[(num_tokens, num_heads + num_kv_heads)](
        q_THD, k_TKD, v_TKD, None if query_norm is None else query_norm.weight,
        None if key_norm is None else key_norm.weight, cos_T1R, sin_T1R, slots_T,
        kv_cache.keys[layer], kv_cache.values[layer],
        kv_cache.key_scales[layer] if is_int8 else None, kv_cache.value_scales[layer] if is_int8 else None,
        q_THD.stride(0), k_TKD.stride(0), v_TKD.stride(0), 0.0 if query_norm is None else query_norm.eps,
        HEADS=num_heads, KV_HEADS=num_kv_heads, SIZE=size, PADDED=triton.next_power_of_2(size),
        ROTATED=0 if cos_T1R is None else cos_T1R.shape[-1], BLOCK=kv_cache.block_size,
        NORMS_ROTATED=attention.norms_rotated, UNIT_OFFSET=query_norm is not None and query_norm.unit_offset,
        num_warps=1, **launch_options(q_THD.device),
    )  # fmt: skip
    return q_THD, k_TKD


def silu_product(gate_up: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Compute silu(gate) * up from (..., 2F), gate and up side by side, to (..., F). dtype: as for `_quantized`."""
    size = gate_up.shape[-1] // 2
    flat_T2F = gate_up.reshape(-1, 2 * size)
    if flat_T2F.stride(1) != 1:
        flat_T2F = flat_T2F.contiguous()
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    numbers_TF, scale_T = _quantized(out, dtype)
    # A row is quantized by one program, because its largest number is its scale.
    tile = _FEED_FORWARD_TILE if numbers_TF is None else triton.next_power_of_2(size)
    _silu_product[(len(flat_T2F), triton.cdiv(size, tile))](
        flat_T2F, out, numbers_TF, scale_T, flat_T2F.stride(0), SIZE=size, TILE=tile,
        num_warps=min(16, max(4, tile // 512)), **launch_options(out.device),
    )  # fmt: skip
    return out


def _quantized(x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor | None, Tensor | None]:
    """Return memory for the rows of x in int8 or fp8 and for their scales, which `QuantizedLinear` finds at x.

    dtype: format of the matrix that is multiplied by x; None for other dtypes. Rows that the matrix pads, and rows too
    long for the registers of one program, are left to `QuantizedLinear`: there is no memory for them, but None.
    """
    if dtype is None or x.shape[-1] % 16 or x.shape[-1] > _LARGEST_QUANTIZED:
        return None, None
    numbers = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    x.quantized = numbers, scales  # type: ignore[attr-defined]
    return numbers, scales


@triton.jit
def _add_norm(
    x, added, weight, bias, total, out, quantized, scales, x_stride, added_stride, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, IS_CENTERED: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    real = columns < SIZE
    numbers = tl.load(x + row * x_stride + columns, mask=real, other=0.0).to(tl.float32)
    if added is not None:
        numbers += tl.load(added + row * added_stride + columns, mask=real, other=0.0).to(tl.float32)
        numbers = numbers.to(out.dtype.element_ty)
        tl.store(total + row * SIZE + columns, numbers, mask=real)
        numbers = numbers.to(tl.float32)
    if IS_CENTERED:
        numbers = tl.where(real, numbers - tl.sum(numbers, 0) / SIZE, 0.0)
    numbers = _normed(numbers, _scale(numbers, eps, SIZE), weight, columns, real, UNIT_OFFSET)
    if bias is not None:
        numbers += tl.load(bias + columns, mask=real, other=0.0).to(tl.float32)
    numbers = numbers.to(out.dtype.element_ty)
    tl.store(out + row * SIZE + columns, numbers, mask=real)
    if quantized is not None:
        store_quantized(numbers.to(tl.float32), quantized, scales, row, columns, SIZE)


@triton.jit
def _rotate_and_write(
    q, k, v, query_weight, key_weight, cosines, sines, slots, keys, values, key_scales, value_scales,
    q_stride, k_stride, v_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROTATED: tl.constexpr,
    BLOCK: tl.constexpr, NORMS_ROTATED: tl.constexpr, UNIT_OFFSET: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute a query head, or a key/value head, of a token."""
    begin(IS_DEPENDENT)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, PADDED)
    real = columns < SIZE
    if head < HEADS:
        _turn(
            q + token * q_stride + head * SIZE,
            query_weight, cosines, sines, token, eps, SIZE, PADDED, ROTATED, NORMS_ROTATED, UNIT_OFFSET,
        )  # fmt: skip
    else:
        kv_head, slot = head - HEADS, tl.load(slots + token)
        numbers = _turn(
            k + token * k_stride + kv_head * SIZE,
            key_weight, cosines, sines, token, eps, SIZE, PADDED, ROTATED, NORMS_ROTATED, UNIT_OFFSET,
        )  # fmt: skip
        _write(numbers, keys, key_scales, slot, kv_head, KV_HEADS, SIZE, PADDED, BLOCK)
        numbers = tl.load(v + token * v_stride + kv_head * SIZE + columns, mask=real, other=0.0)
        _write(numbers, values, value_scales, slot, kv_head, KV_HEADS, SIZE, PADDED, BLOCK)


@triton.jit
def _turn(
    head, weight, cosines, sines, token, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROTATED: tl.constexpr, NORMS_ROTATED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the numbers of a head in place, and return them, in their dtype."""
    columns = tl.arange(0, PADDED)
    real, rotated = columns < SIZE, columns < ROTATED
    own = tl.load(head + columns, mask=real, other=0.0)
    if weight is not None and not NORMS_ROTATED:
        scale = _scale(own, eps, SIZE)
        own = _normed(own, scale, weight, columns, real, UNIT_OFFSET)
    if ROTATED > 0:
        # A number's partner is half of the rotated dimensions away. In the first half the partner is subtracted.
        first = columns < ROTATED // 2
        partners = tl.where(first, columns + ROTATED // 2, columns - ROTATED // 2)
        other = tl.load(head + partners, mask=rotated, other=0.0)
        if weight is not None and not NORMS_ROTATED:
            other = _normed(other, scale, weight, partners, rotated, UNIT_OFFSET)
        cosine = tl.load(cosines + token * ROTATED + columns, mask=rotated, other=1.0)
        sine = tl.load(sines + token * ROTATED + columns, mask=rotated, other=0.0)
        sine = tl.where(first, -sine, sine)
        own = (own.to(tl.float32) * cosine + other.to(tl.float32) * sine).to(own.dtype)
    if weight is not None and NORMS_ROTATED:
        own = _normed(own, _scale(own, eps, SIZE), weight, columns, real, UNIT_OFFSET)
    tl.debug_barrier()  # other threads may have read these numbers as partners
    tl.store(head + columns, own, mask=real)
    return own


@triton.jit
def _scale(numbers, eps, SIZE: tl.constexpr):
    numbers = numbers.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)


@triton.jit
def _normed(numbers, scale, weight, columns, real, UNIT_OFFSET: tl.constexpr):
    weights = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weights = weights + 1.0
    return (numbers.to(tl.float32) * scale * weights).to(numbers.dtype)


@triton.jit
def _write(
    numbers, pool, scales, slot, head,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a head's key or value to the KV-cache, in the cache's dtype; see `model.attention.kv_cache.rounded`."""
    columns = tl.arange(0, PADDED)
    dtype: tl.constexpr = pool.dtype.element_ty
    if scales is not None:
        numbers = numbers.to(tl.float32)
        most = tl.max(tl.abs(numbers), 0) + tl.sum(numbers * 0.0, 0)  # NaN if a number is NaN or infinite
        scale = tl.div_rn(tl.where(most < _TINY, _TINY, most), 127.0)
        numbers = tl.div_rn(numbers, tl.zeros([PADDED], tl.float32) + scale) + _ROUNDER - _ROUNDER
        tl.store(scales + (slot // BLOCK * KV_HEADS + head) * BLOCK + slot % BLOCK, scale)
    elif dtype == tl.float16 and numbers.dtype != tl.float16:
        numbers = numbers.to(tl.float32)
        numbers = tl.where(tl.abs(numbers) > _FLOAT16_MAX, tl.where(numbers > 0, _FLOAT16_MAX, -_FLOAT16_MAX), numbers)
    tl.store(pool + (slot * KV_HEADS + head) * SIZE + columns, numbers.to(dtype), mask=columns < SIZE)


@triton.jit
def _silu_product(
    gate_up, out, quantized, scales, stride, SIZE: tl.constexpr, TILE: tl.constexpr, IS_DEPENDENT: tl.constexpr
):
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = columns < SIZE
    gate = tl.load(gate_up + row * stride + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + columns, mask=real, other=0.0).to(tl.float32)
    # silu is rounded to the dtype before the product, as in PyTorch
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    product = (silu * up).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + columns, product, mask=real)
    if quantized is not None:
        store_quantized(product.to(tl.float32), quantized, scales, row, columns, SIZE)
