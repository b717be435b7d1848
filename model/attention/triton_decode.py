"""Decode attention in Triton, which reads the blocks of the KV-cache in place. Needs triton and a GPU.

Flash-Decoding (Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html): the keys of a sequence are
cut into splits, computed in parallel, and a second kernel joins the splits. The keys of a split depend only on a
sequence's length and the number of key/value heads, so results are batch-invariant.

Legend: B sequences, H query heads, K key/value heads, G = H / K, D head dimension, N blocks of a table, P slots a
block, X splits.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disallow-untyped-decorators=False
# mypy: disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm
from model.system.dependent_launch import begin, launch_options

# Minimum number of keys in a split: joining costs more than smaller splits save. A multiple of both tile sizes.
MIN_SPLIT = 128
_MAX_HEAD = 256
# Number of Triton programs that fill a large GPU. It limits a sequence's splits: splits * key/value heads is about it.
_PROGRAMS = 128


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the Triton kernels support the dtype and the head dimension."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16) and 1 <= head_dim <= _MAX_HEAD


def max_splits(num_kv_heads: int) -> int:
    """Return the maximum number of splits of a sequence's keys: 8, 16, 32 or 64, fewer with more key/value heads."""
    return min(64, max(8, 1 << max(1, _PROGRAMS // num_kv_heads).bit_length() - 1))


def attend(q_BHD: Tensor, form: AttentionForm, positions_B: Tensor, tables_BN: Tensor, kv_cache: KVCache) -> Tensor:
    """Compute decode attention: one query per sequence, over the positions up to its own and within the window.

    Returns a tensor BHD (sequences, query heads, head dimension). See `DecodeKernel`.

    positions_B: int64, position of each query: number of tokens before it in its sequence.
    tables_BN: block tables, contiguous in N; entries after the end of a sequence's context are not read.

    Over an int8 cache, the scales of keys multiply the scores, and the scales of values multiply the weights.
    """
    num_sequences, num_heads, size = q_BHD.shape
    keys_NPKD, values_NPKD = kv_cache.keys[form.layer], kv_cache.values[form.layer]
    num_kv_heads = keys_NPKD.shape[2]
    window = 0 if form.window is None else form.window
    # As many splits as the longest context needs that the block tables hold: a program without keys would only end.
    longest = tables_BN.shape[1] * kv_cache.block_size
    most = max_splits(num_kv_heads)
    splits = min(most, triton.cdiv(min(longest, window or longest), MIN_SPLIT))
    if q_BHD.stride(2) != 1:
        q_BHD = q_BHD.contiguous()
    sums_BHXD = torch.empty((num_sequences, num_heads, splits, size), dtype=torch.float32, device=q_BHD.device)
    scales_BHX2 = torch.empty((num_sequences, num_heads, splits, 2), dtype=torch.float32, device=q_BHD.device)
    out_BHD = torch.empty((num_sequences, num_heads, size), dtype=kv_cache.dtype, device=q_BHD.device)
    padded = max(16, triton.next_power_of_2(size))
    tile = 32 if padded > 128 or q_BHD.dtype == torch.float32 else 64
    _attend_splits[(num_sequences, num_kv_heads, splits)](
        q_BHD, keys_NPKD, values_NPKD, kv_cache.key_scales[form.layer], kv_cache.value_scales[form.layer],
        tables_BN, positions_B, sums_BHXD, scales_BHX2,
        form.scale, window, splits, tables_BN.stride(0), q_BHD.stride(0), q_BHD.stride(1),
        SPLITS=most, MIN_SPLIT=MIN_SPLIT, TILE=tile, BLOCK=kv_cache.block_size, KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads, ROWS=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        SIZE=size, PADDED=padded, HAS_SCALES=kv_cache.cache_dtype is torch.int8,
        # docs/gpu.md has the registers. With 4 warps, float32 numbers of heads over 64 do not fit into them.
        num_warps=8, num_stages=3 if padded * q_BHD.itemsize <= 512 else 2, **launch_options(q_BHD.device),
    )  # fmt: skip
    _join_splits[(num_sequences, num_heads)](
        sums_BHXD, scales_BHX2, positions_B, out_BHD, window, splits,
        SPLITS=most, MIN_SPLIT=MIN_SPLIT, TILE=tile, HEADS=num_heads, SIZE=size, PADDED=padded, num_warps=4,
        **launch_options(q_BHD.device),
    )  # fmt: skip
    return out_BHD


@triton.jit
def _split_size(length, SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, TILE: tl.constexpr):
    each = tl.cdiv(length, SPLITS)  # keys of a split: a multiple of the tile, at least MIN_SPLIT
    return tl.maximum(tl.cdiv(each, TILE) * TILE, MIN_SPLIT)


@triton.jit(do_not_specialize=["window", "splits", "table_stride", "q_stride"])
def _attend_splits(
    q, keys, values, key_scales, value_scales, tables, positions, sums, scales, scale, window, splits, table_stride,
    q_stride, q_head_stride, SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
    HAS_SCALES: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute attention over one split of a sequence's keys, for the query heads that share a key/value head.

    Stores the weighted sum of values in `sums`, and the maximum score and the sum of exponentials in `scales`.
    """
    begin(IS_DEPENDENT)
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context = tl.load(positions + sequence) + 1
    first = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    each = _split_size(context - first, SPLITS, MIN_SPLIT, TILE)
    start = first + split * each
    stop = tl.minimum(start + each, context)
    if start < stop:
        rows, columns, offsets = tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, TILE)
        heads = kv_head * GROUP + rows
        real = (rows < GROUP)[:, None] & (columns < SIZE)[None, :]
        queries = tl.load(
            q + sequence * q_stride + heads[:, None] * q_head_stride + columns[None, :], mask=real, other=0.0
        )
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, PADDED], tl.float32)
        for tile in range(start, stop, TILE):
            places = tile + offsets
            seen = places < stop
            blocks = tl.load(tables + sequence * table_stride + places // BLOCK, mask=seen, other=0).to(tl.int64)
            rows_of_pool = ((blocks * BLOCK + places % BLOCK) * KV_HEADS + kv_head) * SIZE
            k = tl.load(
                keys + rows_of_pool[None, :] + columns[:, None],
                mask=seen[None, :] & (columns < SIZE)[:, None],
                other=0.0,
            )
            scores = tl.dot(queries, k.to(queries.dtype), input_precision="ieee") * scale
            if HAS_SCALES:
                places_of_scales = (blocks * KV_HEADS + kv_head) * BLOCK + places % BLOCK
                scores *= tl.load(key_scales + places_of_scales, mask=seen, other=0.0)[None, :]
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            kept = tl.exp(top - higher)
            total = total * kept + tl.sum(weights, 1)
            v = tl.load(
                values + rows_of_pool[:, None] + columns[None, :],
                mask=seen[:, None] & (columns < SIZE)[None, :],
                other=0.0,
            )
            if HAS_SCALES:
                weights *= tl.load(value_scales + places_of_scales, mask=seen, other=0.0)[None, :]
            weights, v = weights.to(queries.dtype), v.to(queries.dtype)
            mixed = mixed * kept[:, None] + tl.dot(weights, v, input_precision="ieee")
            top = higher
        places_of_sums = (sequence * KV_HEADS * GROUP + heads) * splits + split
        tl.store(sums + places_of_sums[:, None] * SIZE + columns[None, :], mixed, mask=real)
        tl.store(scales + places_of_sums * 2, top, mask=rows < GROUP)
        tl.store(scales + places_of_sums * 2 + 1, total, mask=rows < GROUP)


@triton.jit(do_not_specialize=["window", "splits"])
def _join_splits(
    sums, scales, positions, out, window, splits,
    SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
    PADDED: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Join the results of a sequence's splits for one head: scale each by exp(its maximum - the highest maximum)."""
    begin(IS_DEPENDENT)
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context = tl.load(positions + sequence) + 1
    length = tl.where(window > 0, tl.minimum(context, window), context)
    count = tl.cdiv(length, _split_size(length, SPLITS, MIN_SPLIT, TILE))
    split, columns = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    used = split < count
    places = (sequence * HEADS + head) * splits + split
    tops = tl.load(scales + places * 2, mask=used, other=float("-inf"))
    totals = tl.load(scales + places * 2 + 1, mask=used, other=0.0)
    shares = tl.exp(tops - tl.max(tops, 0))
    mask = used[:, None] & (columns < SIZE)[None, :]
    mixed = tl.load(sums + places[:, None] * SIZE + columns[None, :], mask=mask, other=0.0)
    joined = tl.sum(mixed * shares[:, None], 0) / tl.sum(totals * shares, 0)
    where = out + (sequence * HEADS + head) * SIZE + columns
    tl.store(where, joined.to(out.dtype.element_ty), mask=columns < SIZE)
