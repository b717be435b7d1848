"""Attention by PyTorch's fused kernel (scaled_dot_product_attention): flash attention where PyTorch supports it.

Decodes are computed in one call, over padded copies of the blocks in the window. Prompt chunks are computed one by one.

Legend: T packed tokens, B sequences, Q query tokens of one sequence, S context, H query heads, K key/value heads,
G = H / K query heads per group, D head dimension.
"""

import itertools

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm, AttentionMetadata, soft_cap, visible
from model.system.device_copy import copy_to_device


class SdpaAttention:
    """Attention backend of PyTorch's fused kernel. See `model.attention.backends.AttentionBackend`."""

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        form: AttentionForm,
        metadata: AttentionMetadata,
        kv_cache: KVCache | None,
    ) -> Tensor:
        """Compute attention; equal to `EagerAttention` within float rounding."""
        if kv_cache is None:
            return _attend_uncached(q_THD, k_TKD, v_TKD, form, metadata)
        assert metadata.slot_mapping_T is not None
        if not form.is_written:
            kv_cache.write(form.layer, metadata.slot_mapping_T, k_TKD, v_TKD)
        if metadata.is_decode:
            return _attend_decode(q_THD, form, metadata, kv_cache)
        out_THD = v_TKD.new_empty((*q_THD.shape[:2], v_TKD.shape[2]))
        starts = metadata.query_starts
        if metadata.decode_rows:
            (tokens,) = copy_to_device(q_THD.device, [np.array([starts[row] for row in metadata.decode_rows])])
            out_THD[tokens] = _attend_decode(q_THD[tokens], form, metadata, kv_cache)
        for row, query_length in enumerate(metadata.query_lengths):
            if query_length > 1:
                span = slice(starts[row], starts[row + 1])
                out_THD[span] = _attend_chunk(q_THD[span], row, form, metadata, kv_cache)
        return out_THD


def _attend_uncached(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, form: AttentionForm, metadata: AttentionMetadata
) -> Tensor:
    """Compute attention in whole sequences, uncached. Sequences of equal length, as in training, take one call."""
    lengths = metadata.query_lengths
    if len(set(lengths)) > 1:
        spans = [slice(start, end) for start, end in itertools.pairwise(metadata.query_starts)]
        return torch.cat([causal(q_THD[span], k_TKD[span], v_TKD[span], form) for span in spans])
    shape = (len(lengths), lengths[0])
    q_BSHD, k_BSKD, v_BSKD = (torch.unflatten(x, 0, shape) for x in (q_THD, k_TKD, v_TKD))
    mask = _mask(q_BSHD, k_BSKD, form)
    q_BHSD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (q_BSHD, k_BSKD, v_BSKD))
    return _fused(q_BHSD, k_BKSD, v_BKSD, form, mask).transpose(1, 2).flatten(0, 1)


def _attend_decode(q_BHD: Tensor, form: AttentionForm, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
    """Compute the attention of each decoding sequence's new token over its context, padded and masked. Returns BHD."""
    view = metadata.decode_view(form.window, kv_cache.block_size)
    slots_BS = view.slots_BS
    found = kv_cache.gather(form.layer, slots_BS.flatten())
    k_BSKD, v_BSKD = (torch.unflatten(x_SKD, 0, slots_BS.shape) for x_SKD in found)
    # The G query heads of a group take the dimension of query tokens, because they see the same keys.
    q_BKGD = torch.unflatten(q_BHD, 1, (k_BSKD.shape[2], -1))
    mask_BXXS = view.mask_B1S[:, None].to(v_BSKD.dtype)
    if form.bias is not None:
        bias_BHS = form.bias(q_BHD[:, None], k_BSKD, view.distances_B1S)[:, :, 0]
        mask_BXXS = mask_BXXS + torch.unflatten(bias_BHS, 1, q_BKGD.shape[1:3]).to(v_BSKD.dtype)
    return _fused(q_BKGD, k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2), form, mask_BXXS).flatten(1, 2)


def _attend_chunk(
    q_QHD: Tensor, row: int, form: AttentionForm, metadata: AttentionMetadata, kv_cache: KVCache
) -> Tensor:
    """Compute the attention of a prompt chunk of sequence `row` over its cached context. Returns a tensor QHD."""
    assert metadata.block_tables_BN is not None
    context_length, first = metadata.context_lengths[row], 0
    if form.window is not None:  # start at the first block that the first query sees
        first = max(0, context_length - len(q_QHD) + 1 - form.window) // kv_cache.block_size
    num_blocks = -(-context_length // kv_cache.block_size)
    slots_S = kv_cache.slots_of(metadata.block_tables_BN[row, first:num_blocks])
    k_SKD, v_SKD = kv_cache.gather(form.layer, slots_S[: context_length - first * kv_cache.block_size])
    return causal(q_QHD, k_SKD, v_SKD, form)


def causal(q_QHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, form: AttentionForm) -> Tensor:
    """Compute causal attention of one sequence; the queries are at the last Q of S positions. Returns a tensor QHD."""
    num_kv_heads, groups = k_SKD.shape[1], q_QHD.shape[1] // k_SKD.shape[1]
    mask = _mask(q_QHD[None], k_SKD[None], form)
    if mask is not None and mask.ndim == 4:
        mask = torch.unflatten(mask[0], 0, (num_kv_heads, groups))  # KGQS
    q_KGQD = torch.unflatten(q_QHD.transpose(0, 1), 0, (num_kv_heads, groups))
    k_KGSD, v_KGSD = (x.transpose(0, 1)[:, None].expand(-1, groups, -1, -1) for x in (k_SKD, v_SKD))
    return _fused(q_KGQD, k_KGSD, v_KGSD, form, mask).flatten(0, 1).transpose(0, 1)


def _mask(q_BQHD: Tensor, k_BSKD: Tensor, form: AttentionForm) -> Tensor | None:
    """Return the attention mask for PyTorch's kernel; None for plain causal attention of whole sequences.

    With a score bias the mask is this bias, BHQS or 1HQS, with -inf at hidden positions. Else it is boolean, QS
    (queries, positions), for a window or for queries at the end of a longer context.
    """
    num_queries, context_length = q_BQHD.shape[1], k_BSKD.shape[1]
    if form.bias is None and form.window is None and num_queries == context_length:
        return None
    keys_S = torch.arange(context_length, device=q_BQHD.device)
    distances_QS = keys_S[context_length - num_queries :, None] - keys_S
    visible_QS = visible(distances_QS, form.window)
    if form.bias is None:
        return visible_QS
    bias = form.bias(q_BQHD, k_BSKD, distances_QS[None])
    return bias.masked_fill(~visible_QS, -torch.inf)


def _fused(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm, mask: Tensor | None) -> Tensor:
    """Return attention by PyTorch's kernel, or with a soft cap by `_soft_capped`. mask None: causal attention.

    The tensors' last two dimensions are tokens and D, the dimension before is heads.
    """
    if q.shape[-1] == 0:  # equal weights: zeros replace q and k, because no kernel supports D = 0
        q, k = (v.new_zeros(()).expand(*x.shape[:-1], v.shape[-1]) for x in (q, k))
    if form.soft_cap is not None:
        return _soft_capped(q, k, v, form, mask)
    gqa = q.ndim == 4 and q.shape[1] != k.shape[1]
    if mask is None:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=form.scale, enable_gqa=gqa)
    if mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=form.scale, enable_gqa=gqa)


def _soft_capped(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm, mask: Tensor | None) -> Tensor:
    """Compute attention with bounded scores, which no fused kernel of PyTorch supports. Arguments as for `_fused`."""
    assert form.soft_cap is not None
    if q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scores = soft_cap((q.float() @ k.float().transpose(-1, -2)) * form.scale, form.soft_cap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1).to(v.dtype) @ v
