"""GPU attention over a paged KV-cache, with separate kernels for decodes and prompt chunks.

The two kernels are arguments of the backend; `model.attention.kernel_selection` chooses them. The decode kernel reads
only tensors on the device, and their shapes do not depend on context lengths. A decode step can therefore be captured
as a CUDA graph. `SdpaAttention` handles layers with a bias, keys with D = 0, and sequences without a cache.

Legend: T packed tokens, B sequences that compute one token, X packed tokens of chunks, H query heads, K key/value
heads, D head dimension.
"""

from typing import Protocol

from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.layer_spec import AttentionForm
from model.attention.metadata import AttentionMetadata, RaggedView
from model.attention.sdpa import SdpaAttention


class DecodeKernel(Protocol):
    """Attention kernel for sequences that compute one token."""

    def __call__(
        self, q_BHD: Tensor, form: AttentionForm, positions_B: Tensor, tables_BN: Tensor, kv_cache: KVCache
    ) -> Tensor:
        """Attend from each query to the positions up to its own, within the window. Returns BHD in the values' dtype.

        CUDA graph capture requires that nothing is copied to or from the host, and that no shape depends on the
        contents of a tensor. Table entries after the end of a sequence's context may be any valid block.
        """
        ...


class ChunkKernel(Protocol):
    """Attention kernel for prompt chunks."""

    def __call__(self, q_XHD: Tensor, form: AttentionForm, view: RaggedView, kv_cache: KVCache) -> Tensor:
        """Attend from each query to the positions of its sequence up to its own, within the window.

        Returns XHD in the values' dtype.
        """
        ...


class PagedAttention:
    """Attention backend for paged GPU caches. See `model.attention.backends.AttentionBackend`."""

    def __init__(self, decode: DecodeKernel, chunks: ChunkKernel) -> None:
        self._decode = decode
        self._chunks = chunks
        self._others = SdpaAttention()

    @staticmethod
    def takes(form: AttentionForm, key_dim: int) -> bool:
        """Return whether the paged kernels support the layer; `SdpaAttention` handles other layers."""
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
        """Compute attention; equal to `EagerAttention` within float rounding."""
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
