"""Attention written out: softmax(Q K^T / sqrt(D) + causal mask) V, one sequence at a time.

The oracle every other backend is compared with. Formula: Vaswani et al. 2017 (arXiv 1706.03762), equation 1.

Legend: T packed tokens, Q query tokens of one sequence, S its context, H query heads, K key/value heads, D head dim.
"""

import math

import torch
from torch import Tensor

from model.attention.metadata import AttentionMetadata
from model.kv_cache import KVCache


class EagerAttention:
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
        """Every sequence on its own; scores and softmax in float32."""
        if kv_cache is not None:
            assert metadata.slot_mapping_T is not None
            kv_cache.write(layer, metadata.slot_mapping_T, k_TKD, v_TKD)
        outputs = []
        for row, context_length in enumerate(metadata.context_lengths):
            start, end = metadata.query_starts[row], metadata.query_starts[row + 1]
            if kv_cache is None:
                k_SKD, v_SKD = k_TKD[start:end], v_TKD[start:end]
            else:
                assert metadata.block_tables_BN is not None
                k_1SKD, v_1SKD = kv_cache.gather(layer, metadata.block_tables_BN[row : row + 1])
                k_SKD, v_SKD = k_1SKD[0, :context_length], v_1SKD[0, :context_length]
            outputs.append(_attend_one(q_THD[start:end], k_SKD, v_SKD))
        return torch.cat(outputs)


def _attend_one(q_QHD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> Tensor:
    """One sequence whose queries are the last Q of its S positions. Returns QHD."""
    num_queries, num_heads, head_dim = q_QHD.shape
    context_length, num_kv_heads, _ = k_SKD.shape
    # Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): H / K query heads share a key/value head.
    k_SHD = k_SKD.repeat_interleave(num_heads // num_kv_heads, dim=1).float()
    v_SHD = v_SKD.repeat_interleave(num_heads // num_kv_heads, dim=1).float()
    scores_HQS = torch.einsum("qhd,shd->hqs", q_QHD.float(), k_SHD) / math.sqrt(head_dim)
    positions_Q = torch.arange(context_length - num_queries, context_length, device=q_QHD.device)
    future_QS = torch.arange(context_length, device=q_QHD.device)[None, :] > positions_Q[:, None]
    weights_HQS = scores_HQS.masked_fill(future_QS, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqs,shd->qhd", weights_HQS, v_SHD).to(q_QHD.dtype)
