"""Table of attention backends. A backend is the only writer of the KV-cache.

Legend: T packed tokens, H query heads, K key/value heads, D head dimension.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.attention.eager import EagerAttention
from model.attention.kv_cache import KVCache, rounded
from model.attention.layer_spec import AttentionForm
from model.attention.metadata import AttentionMetadata
from model.attention.sdpa import SdpaAttention


class AttentionBackend(Protocol):
    """Causal attention over a packed, ragged batch."""

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
        """Return softmax(scale q k^T + bias) v for each token, over the earlier tokens of its sequence and itself.

        A window in `form` limits how far back a token sees. With a cache, the step's keys and values are first
        written to `metadata.slot_mapping_T`; earlier ones are read through `metadata.block_tables_BN`. Queries and
        keys with D = 0 give equal weights. The result is THD, with the dtype and the head dimension D of the values.
        """
        ...


# Backends in PyTorch alone. `NativeAttention` needs a kernel library, `PagedAttention` its kernels.
ATTENTION_BACKENDS: dict[str, AttentionBackend] = {
    "eager": EagerAttention(),
    "sdpa": SdpaAttention(),
}


@dataclass(frozen=True, slots=True)
class RoundedAttention:
    """Wrapper of a backend that rounds keys and values to `cache_dtype`, as a KV-cache of that dtype would hold them.

    Inspection and evaluation run without a cache. Rounding makes their results equal to those of serving.
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
