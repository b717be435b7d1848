"""Attention without a cache, with keys and values rounded as a KV-cache of another dtype would hold them.

Inspection and evaluation run without a cache. Rounding makes their results equal to those of serving.

Legend: T packed tokens, H query heads, K key/value heads, D head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention.backends import AttentionBackend
from model.attention.kv_cache import KVCache, rounded
from model.attention.layer_spec import AttentionForm
from model.attention.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class AsCached:
    """Wrapper of `backend` that rounds keys and values to the cache dtype `cache_dtype`.

    See `model.attention.backends.AttentionBackend`.
    """

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
        """Return the backend's attention over the rounded keys and values. The dtype is the backend's own."""
        k_TKD, v_TKD = (rounded(x_TKD, self.cache_dtype).to(x_TKD.dtype) for x_TKD in (k_TKD, v_TKD))
        return self.backend.attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=kv_cache)
