"""Attention arguments of all layers over one cache, for the kernel that computes all layers in one call."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.native import KERNEL_NAMES, AttentionCall, NativeAttention, is_known
from model.kernels.kernel_library import KernelLibrary
from model.nn.transformer import Attention


@dataclass(frozen=True, slots=True)
class AttentionCalls:
    """Array `layers` of `AttentionCall`, and the kernel function that they are for.

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
