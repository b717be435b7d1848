"""Prepared calls of the native kernels, reused from step to step while their tensors are updated in place.

After a model's pass the CPU caches hold mostly its weights. Each Python, NumPy or PyTorch operation then takes ten
times as long as in a loop. A prepared step leaves a single call.

Legend: T packed tokens, B sequences, V vocabulary.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.attention.native import KERNEL_NAMES, AttentionCall, NativeAttention, is_known
from model.kernels.ctypes_structs import Decode, Rows
from model.kernels.kernel_library import KernelLibrary
from model.nn.transformer import Attention


class Decoded(NamedTuple):
    """Result of a decode step: each row's most likely id, the first of equals, and its logits BV float32.

    The id is -1 if a logit of the row, or a number of the hidden state before it, is NaN or infinite.
    """

    ids: list[int]
    logits_BV: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCall:
    """Arguments of a prepared decode step, and the objects that its pointers refer to."""

    decode: Decode
    rows: Rows
    token_ids_T: Tensor
    metadata: AttentionMetadata
    kv_cache: KVCache
    logits_BV: Tensor
    ids: Any
    held: tuple[object, ...]

    @property
    def reference(self) -> Any:
        """Return the C argument."""
        return ctypes.byref(self.decode)

    def is_of(self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache, num_ids: int) -> bool:
        """Return whether a step uses the same tensors, whose contents may have changed."""
        ours = self.metadata
        return (
            self.token_ids_T is token_ids_T
            and ours.positions_T is metadata.positions_T
            and ours.slot_mapping_T is metadata.slot_mapping_T
            and ours.block_tables_BN is metadata.block_tables_BN
            and ours.contexts_B is metadata.contexts_B
            and self.kv_cache is kv_cache
            and self.decode.num_ids == num_ids
            and self.rows.threads == torch.get_num_threads()
        )

    def decoded(self) -> Decoded:
        """Return the result of the last computed step."""
        return Decoded(self.ids[:], self.logits_BV)


@dataclass(frozen=True, slots=True)
class AttentionCalls:
    """Attention arguments of all layers over one cache, for the kernel that computes all layers in one call.

    `backend` and `kernel` are None if some layer's attention is not computed by the native kernel, or adds a bias to
    its scores.
    """

    kv_cache: KVCache
    backend: NativeAttention | None
    layers: Any
    kernel: ctypes.c_void_p | None

    @classmethod
    def of(
        cls,
        attentions: Sequence[Attention],
        heads: tuple[Tensor, Tensor, Tensor],
        mixed: Tensor,
        kv_cache: KVCache,
        library: KernelLibrary,
    ) -> Self:
        """Prepare each layer's call, from queries, keys and values to `mixed`: all layers use the same buffers."""
        backend = attentions[0].backend
        calls = (AttentionCall * len(attentions))()
        for call, attention in zip(calls, attentions, strict=True):
            form = attention.form
            if attention.backend is not backend or form.bias is not None or not is_known(*heads[::2], form, kv_cache):
                return cls(kv_cache, None, calls, None)
            pools = kv_cache.keys_LNPKD[form.layer], kv_cache.values_LNPKD[form.layer]
            call.q, call.k, call.v, call.out, call.keys, call.values = (x.data_ptr() for x in (*heads, mixed, *pools))
            call.q_stride, call.k_stride, call.v_stride = (x.stride(0) for x in heads)
            call.num_heads, call.num_kv_heads, call.head_size = *(x.shape[1] for x in heads[:2]), heads[0].shape[2]
            call.window, call.scale = form.window or 0, form.scale
        if not isinstance(backend, NativeAttention):
            return cls(kv_cache, None, calls, None)
        name = KERNEL_NAMES[kv_cache.dtype, kv_cache.cache_dtype]
        kernel = library.function(name, ctypes.c_void_p, ctypes.c_void_p)
        return cls(kv_cache, backend, calls, ctypes.cast(kernel, ctypes.c_void_p))

    def use(self, threads: int) -> None:
        """Set the number of threads of all calls."""
        if self.layers[0].threads != threads:
            for call in self.layers:
                call.threads = threads
