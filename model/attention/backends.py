"""Attention backends: their interface, the reference implementation, and the table of backends.

Legend: T packed tokens, Q query tokens of one sequence, S its context, H query heads, K key/value heads,
D head dimension.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.attention.kv_cache import KVCache, rounded
from model.attention.metadata import AttentionForm, AttentionMetadata, soft_cap, visible
from model.attention.sdpa import SdpaAttention


class AttentionBackend(Protocol):
    """Interface of an attention backend: causal attention of a packed batch of sequences."""

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
        """Return each token's attention output, softmax(scale q k^T + bias) v, with the products bounded by a soft cap.

        k and v are those of the token itself and of earlier tokens of its sequence, no further back than the window in
        `form`. With a KV-cache, the step's keys and values are first written to the slots `metadata.slot_mapping_T`,
        unless `form.is_written`; keys and values of earlier steps are read through `metadata.block_tables_BN`. The
        result has the shape THD
        (tokens, query heads, head dimension of the values) and the dtype of the values.
        """
        ...


class EagerAttention:
    """Reference implementation of `AttentionBackend`: softmax(scale Q K^T + bias + causal mask) V, in float32.

    Tests compare every other backend with it. Formula: Vaswani et al. 2017 (arXiv 1706.03762), equation 1.
    """

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
        """Compute the attention output of one sequence after the other by the formula, without a fused kernel."""
        if kv_cache is not None:
            assert metadata.slot_mapping_T is not None
            if not form.is_written:
                kv_cache.write(form.layer, metadata.slot_mapping_T, k_TKD, v_TKD)
        outputs = []
        for row, context_length in enumerate(metadata.context_lengths):
            start, end = metadata.query_starts[row], metadata.query_starts[row + 1]
            if kv_cache is None:
                k_SKD, v_SKD = k_TKD[start:end], v_TKD[start:end]
            else:
                assert metadata.block_tables_BN is not None
                slots_S = kv_cache.slots_of(metadata.block_tables_BN[row])[:context_length]
                k_SKD, v_SKD = kv_cache.gather(form.layer, slots_S)
            weights_HQS = attention_weights(q_THD[start:end], k_SKD, form)
            v_SHD = v_SKD.repeat_interleave(weights_HQS.shape[0] // v_SKD.shape[1], dim=1).float()
            outputs.append(torch.einsum("hqs,shd->qhd", weights_HQS, v_SHD).to(v_SKD.dtype))
        return torch.cat(outputs)


def attention_weights(q_QHD: Tensor, k_SKD: Tensor, form: AttentionForm) -> Tensor:
    """Return the attention weights of one sequence, float32, with the shape HQS (query heads, queries, positions).

    The queries are those of the last Q of the sequence's S positions. With D = 0 (average attention, without keys) all
    scores are 0, so visible positions have equal weights.
    """
    num_queries, num_heads, _ = q_QHD.shape
    context_length, num_kv_heads, _ = k_SKD.shape
    # Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): H / K query heads share a key/value head.
    k_SHD = k_SKD.repeat_interleave(num_heads // num_kv_heads, dim=1).float()
    scores_HQS = torch.einsum("qhd,shd->hqs", q_QHD.float(), k_SHD) * form.scale
    if form.soft_cap is not None:
        scores_HQS = soft_cap(scores_HQS, form.soft_cap)
    keys_S = torch.arange(context_length, device=q_QHD.device)
    distances_QS = keys_S[context_length - num_queries :, None] - keys_S
    if form.bias is not None:
        scores_HQS = scores_HQS + form.bias(q_QHD[None].float(), k_SKD[None].float(), distances_QS[None])[0]
    return scores_HQS.masked_fill(~visible(distances_QS, form.window), -torch.inf).softmax(dim=-1)


# Backends without arguments. `NativeAttention` needs a kernel library, and `PagedAttention` a choice of kernels.
ATTENTION_BACKENDS: dict[str, AttentionBackend] = {"eager": EagerAttention(), "sdpa": SdpaAttention()}


@dataclass(frozen=True, slots=True)
class RoundedAttention:
    """Wrapper of an attention backend: rounds keys and values to `cache_dtype`, as a KV-cache would."""

    backend: AttentionBackend
    cache_dtype: torch.dtype

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
        """Round the keys and values, and return the attention output of the wrapped backend."""
        k_TKD, v_TKD = (rounded(x_TKD, self.cache_dtype).to(x_TKD.dtype) for x_TKD in (k_TKD, v_TKD))
        return self.backend.attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=kv_cache)
