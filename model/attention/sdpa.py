"""Attention by PyTorch's fused kernels: flash attention on CPU and GPU where it applies.

Sequences that compute one token (decode) are attended together over padded copies of their blocks; the others
(prompt chunks) one by one. Grouped heads are never copied: a key/value head becomes a batch entry whose
`H / K` query heads see the same keys through a stride of 0.

Legend: T packed tokens, B sequences, Q query tokens of one sequence, S context, H query heads, K key/value heads,
G = H / K query heads per group, D head dimension.
"""

import itertools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model.attention.metadata import AttentionMetadata
from model.kv_cache import KVCache


class SdpaAttention:
    """See `model.attention.interface.AttentionBackend`."""

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        layer: int,
        metadata: AttentionMetadata,
        kv_cache: KVCache | None,
    ) -> Tensor:
        """Equal to the eager oracle within float rounding."""
        if kv_cache is None:
            return _attend_uncached(q_THD, k_TKD, v_TKD, metadata)
        assert metadata.slot_mapping_T is not None
        kv_cache.write(layer, metadata.slot_mapping_T, k_TKD, v_TKD)
        if metadata.is_decode:
            return _attend_decode(q_THD, layer, metadata, kv_cache)
        out_THD = torch.empty_like(q_THD)
        starts = metadata.query_starts
        if metadata.decode_rows:
            tokens = torch.tensor([starts[row] for row in metadata.decode_rows], device=q_THD.device)
            out_THD[tokens] = _attend_decode(q_THD[tokens], layer, metadata, kv_cache)
        for row, query_length in enumerate(metadata.query_lengths):
            if query_length > 1:
                span = slice(starts[row], starts[row + 1])
                out_THD[span] = _attend_chunk(q_THD[span], layer, row, metadata, kv_cache)
        return out_THD


def _attend_uncached(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Whole sequences; those of one length, as in training, in one call."""
    lengths = metadata.query_lengths
    if len(set(lengths)) == 1:
        shape = (len(lengths), lengths[0])
        q_BHSD, k_BKSD, v_BKSD = (torch.unflatten(x, 0, shape).transpose(1, 2) for x in (q_THD, k_TKD, v_TKD))
        groups = q_BHSD.shape[1] // k_BKSD.shape[1]
        out_BHSD = scaled_dot_product_attention(q_BHSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=groups > 1)
        return out_BHSD.transpose(1, 2).flatten(0, 1)
    spans = [slice(start, end) for start, end in itertools.pairwise(metadata.query_starts)]
    return torch.cat([_causal(q_THD[span], k_TKD[span], v_TKD[span]) for span in spans])


def _attend_decode(q_BHD: Tensor, layer: int, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
    """The one new token of each of the `decode_rows`, over its padded, masked context. Returns BHD."""
    assert metadata.block_tables_BN is not None
    longest = metadata.decode_mask_B1S.shape[-1]
    num_blocks = -(-longest // kv_cache.block_size)
    tables_BN = metadata.block_tables_BN[:, :num_blocks]
    if not metadata.is_decode:
        tables_BN = tables_BN[list(metadata.decode_rows)]
    k_BSKD, v_BSKD = kv_cache.gather(layer, tables_BN)
    k_BKSD, v_BKSD = (x[:, :longest].transpose(1, 2) for x in (k_BSKD, v_BSKD))
    # The G query heads of a group stand where query tokens would: they see the same keys and the same mask.
    q_BKGD = torch.unflatten(q_BHD, 1, (k_BKSD.shape[1], -1))
    mask_B11S = metadata.decode_mask_B1S[:, None].to(q_BHD.dtype)
    return scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD, attn_mask=mask_B11S).flatten(1, 2)


def _attend_chunk(q_QHD: Tensor, layer: int, row: int, metadata: AttentionMetadata, kv_cache: KVCache) -> Tensor:
    """A prompt chunk of sequence `row` over its cached past and itself. Returns QHD."""
    assert metadata.block_tables_BN is not None
    context_length = metadata.context_lengths[row]
    num_blocks = -(-context_length // kv_cache.block_size)
    k_1SKD, v_1SKD = kv_cache.gather(layer, metadata.block_tables_BN[row : row + 1, :num_blocks])
    return _causal(q_QHD, k_1SKD[0, :context_length], v_1SKD[0, :context_length])


def _causal(q_QHD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> Tensor:
    """One sequence whose queries are the last Q of its S positions. Returns QHD."""
    num_queries, num_heads, _ = q_QHD.shape
    context_length, num_kv_heads, _ = k_SKD.shape
    q_KGQD = torch.unflatten(q_QHD.transpose(0, 1), 0, (num_kv_heads, -1))
    groups = num_heads // num_kv_heads
    k_KGSD, v_KGSD = (x.transpose(0, 1)[:, None].expand(-1, groups, -1, -1) for x in (k_SKD, v_SKD))
    if num_queries == context_length:
        out_KGQD = scaled_dot_product_attention(q_KGQD, k_KGSD, v_KGSD, is_causal=True)
    else:
        visible_QS = torch.ones(num_queries, context_length, dtype=torch.bool, device=q_QHD.device)
        visible_QS = visible_QS.tril(diagonal=context_length - num_queries)
        out_KGQD = scaled_dot_product_attention(q_KGQD, k_KGSD, v_KGSD, attn_mask=visible_QS)
    return out_KGQD.flatten(0, 1).transpose(0, 1)
