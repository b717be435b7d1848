"""Attention to keys and values as a cache of another dtype would hold them, where there is none.

So what is computed beside the cache, for people to look at or to measure, is what is served.

Legend: T packed tokens, H query heads, K key/value heads, D head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention.form import AttentionForm
from model.attention.interface import AttentionBackend
from model.attention.metadata import AttentionMetadata
from model.kv_cache import KVCache, rounded


@dataclass(frozen=True, slots=True)
class AsCached:
    """See `model.attention.interface.AttentionBackend`: `backend`, which gets keys and values rounded."""

    backend: AttentionBackend
    held_as: torch.dtype

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
        """What the backend gives, in the dtype that it would give."""
        k_TKD, v_TKD = (rounded(x_TKD, self.held_as).to(x_TKD.dtype) for x_TKD in (k_TKD, v_TKD))
        return self.backend.attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=kv_cache)
