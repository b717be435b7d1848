"""Reference implementation of attention: softmax(scale Q K^T + bias + causal mask) V, one sequence at a time.

Tests compare every other backend with it. Formula: Vaswani et al. 2017 (arXiv 1706.03762), equation 1.

Legend: T packed tokens, Q query tokens of one sequence, S its context, H query heads, K key/value heads, D head dim.
"""

import torch
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.layer_spec import AttentionForm, visible
from model.attention.metadata import AttentionMetadata


class EagerAttention:
    """Reference attention backend. See `model.attention.backends.AttentionBackend`."""

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
        """Compute attention sequence by sequence; scores and softmax are float32."""
        if kv_cache is not None:
            assert metadata.slot_mapping_T is not None
            kv_cache.write(form.layer, metadata.slot_mapping_T, k_TKD, v_TKD)
        outputs = []
        for row, context_length in enumerate(metadata.context_lengths):
            start, end = metadata.query_starts[row], metadata.query_starts[row + 1]
            if kv_cache is None:
                k_SKD, v_SKD = k_TKD[start:end], v_TKD[start:end]
            else:
                assert metadata.block_tables_BN is not None
                k_1SKD, v_1SKD = kv_cache.gather(form.layer, metadata.block_tables_BN[row : row + 1])
                k_SKD, v_SKD = k_1SKD[0, :context_length], v_1SKD[0, :context_length]
            weights_HQS = attention_weights(q_THD[start:end], k_SKD, form)
            v_SHD = v_SKD.repeat_interleave(weights_HQS.shape[0] // v_SKD.shape[1], dim=1).float()
            outputs.append(torch.einsum("hqs,shd->qhd", weights_HQS, v_SHD).to(v_SKD.dtype))
        return torch.cat(outputs)


def attention_weights(q_QHD: Tensor, k_SKD: Tensor, form: AttentionForm) -> Tensor:
    """Return the weights HQS, float32, of one sequence; its queries are the last Q of its S positions.

    Rows sum to 1. Positions that a token does not see have weight 0. With D = 0 (average attention) every score is an
    empty sum, so without a bias all visible positions have equal weights.
    """
    num_queries, num_heads, _ = q_QHD.shape
    context_length, num_kv_heads, _ = k_SKD.shape
    # Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): H / K query heads share a key/value head.
    k_SHD = k_SKD.repeat_interleave(num_heads // num_kv_heads, dim=1).float()
    scores_HQS = torch.einsum("qhd,shd->hqs", q_QHD.float(), k_SHD) * form.scale
    keys_S = torch.arange(context_length, device=q_QHD.device)
    distances_QS = keys_S[context_length - num_queries :, None] - keys_S
    if form.bias is not None:
        scores_HQS = scores_HQS + form.bias(q_QHD[None].float(), k_SKD[None].float(), distances_QS[None])[0]
    return scores_HQS.masked_fill(~visible(distances_QS, form.window), -torch.inf).softmax(dim=-1)
