"""The table of attention backends. A backend is the only writer of the KV-cache.

Legend: T packed tokens, H query heads, K key/value heads, D head dimension.
"""

from typing import Protocol

from torch import Tensor

from model.attention.eager import EagerAttention
from model.attention.form import AttentionForm
from model.attention.metadata import AttentionMetadata
from model.attention.native import NativeAttention
from model.attention.sdpa import SdpaAttention
from model.kv_cache import KVCache


class AttentionBackend(Protocol):
    """Causal attention of a packed, ragged batch."""

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
        """Each token's values weighted by softmax(scale q k^T + bias) over its own past and itself, as far as it sees.

        With a cache, this step's keys and values are written to `metadata.slot_mapping_T` first and the past is
        read through `metadata.block_tables_BN`. Queries and keys of no numbers (D = 0) give equal weights. Returns
        THD, D that of the values, in their dtype.
        """
        ...


ATTENTION_BACKENDS: dict[str, AttentionBackend] = {
    "eager": EagerAttention(),
    "sdpa": SdpaAttention(),
    "native": NativeAttention(),
}
