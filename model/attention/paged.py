"""Attention over a paged cache for a GPU: what decodes and what chunks of prompts take is chosen when it is made.

Sequences that compute one token and prompt chunks want different kernels, so that a backend here is two ways to attend
(`model.attention.ways` has them). Decoding reads nothing but tensors of the device, of shapes that do not depend on the
lengths of contexts: a step of decodes can be captured as a CUDA graph. A form with a bias, keys of no numbers, and
sequences without a cache go to another backend.

Legend: T packed tokens, B sequences that compute one token, X packed tokens of chunks, H query heads, K key/value
heads, D head dimension.
"""

from typing import Protocol

from torch import Tensor

from model.attention.form import AttentionForm
from model.attention.metadata import AttentionMetadata
from model.attention.ragged import RaggedView
from model.attention.sdpa import SdpaAttention
from model.kv_cache import KVCache


class DecodeWay(Protocol):
    """How sequences that compute one token attend."""

    def __call__(
        self, q_BHD: Tensor, form: AttentionForm, positions_B: Tensor, tables_BN: Tensor, kv_cache: KVCache
    ) -> Tensor:
        """Each query over positions 0 to its own, as far as the window goes. Returns BHD in the values' dtype.

        Nothing is copied to or from the host, and no shape depends on a number that stands in a tensor. Entries of a
        table behind a sequence's context may be any valid block.
        """
        ...


class ChunkWay(Protocol):
    """How prompt chunks attend."""

    def __call__(self, q_XHD: Tensor, form: AttentionForm, view: RaggedView, kv_cache: KVCache) -> Tensor:
        """Each query over the past of its sequence and itself. Returns XHD in the values' dtype."""
        ...


class PagedAttention:
    """See `model.attention.interface.AttentionBackend`."""

    def __init__(self, decode: DecodeWay, chunks: ChunkWay) -> None:
        self._decode = decode
        self._chunks = chunks
        self._others = SdpaAttention()

    @staticmethod
    def takes(form: AttentionForm, key_dim: int) -> bool:
        """Whether such a layer is attended here, and not by the other backend."""
        return form.bias is None and key_dim > 0

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
        """Equal to the eager oracle within float rounding."""
        if kv_cache is None or not self.takes(form, q_THD.shape[-1]):
            return self._others.attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=kv_cache)
        assert metadata.slot_mapping_T is not None
        assert metadata.block_tables_BN is not None
        kv_cache.write(form.layer, metadata.slot_mapping_T, k_TKD, v_TKD)
        if metadata.is_decode:
            return self._decode(q_THD, form, metadata.positions_T, metadata.block_tables_BN, kv_cache)
        view = metadata.ragged_view(kv_cache.block_size)
        out_THD = v_TKD.new_empty((*q_THD.shape[:2], v_TKD.shape[2]))
        if view.decodes is not None:
            tokens, positions_B, tables_BN = view.decodes
            out_THD[tokens] = self._decode(q_THD[tokens], form, positions_B, tables_BN, kv_cache)
        out_THD[view.tokens_X] = self._chunks(q_THD[view.tokens_X], form, view, kv_cache)
        return out_THD
