"""Native CPU attention that reads the blocks of the KV-cache in place: model/kernels/src/attention.cpp.

A token's output is bitwise identical for every batch, number of threads and chunking of the prompt.

Legend: T packed tokens, B sequences, N blocks of a table, H query heads, K key/value heads, D head dimension.
"""

import ctypes
from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm, AttentionMetadata
from model.attention.score_biases import AlibiBias, RelativeBias
from model.attention.sdpa import SdpaAttention
from model.kernels.kernel_library import AttentionBatch, AttentionCall, KernelLibrary

# C names of the attention kernels, by the dtypes of computation and of the KV-cache.
KERNEL_NAMES = {
    (torch.float32, torch.float32): "kvasir_attention_float32",
    (torch.float32, torch.float16): "kvasir_attention_float32_over_float16",
    (torch.float32, torch.int8): "kvasir_attention_float32_over_int8",
    (torch.bfloat16, torch.bfloat16): "kvasir_attention_bfloat16",
    (torch.bfloat16, torch.int8): "kvasir_attention_bfloat16_over_int8",
}
_LARGEST_HEAD = 512
_LOG2_E = 1.4426950408889634  # the kernel computes 2^x, not e^x
# Sizes of the kernel's tiles: keys, and rows of queries in a task. The kernel reads a row's biases for the whole tile,
# also for keys after the row's position. It may read up to _TILE + _TASK_ROWS floats past the bias of distance 0.
_TILE, _TASK_ROWS = 128, 96


class AttentionStep(NamedTuple):
    """Native attention arguments that all layers of a step share. held: objects that own the memory behind `batch`."""

    batch: AttentionBatch
    held: tuple[object, ...]
    longest: int  # tokens of the longest context
    threads: int


class NativeAttention:
    """Native CPU attention backend. See `model.attention.backends.AttentionBackend`.

    `SdpaAttention` computes sequences without a cache, and layers that the kernel does not support (`supports`).
    """

    def __init__(self, kernels: KernelLibrary) -> None:
        self.kernels = kernels
        self._fallback = SdpaAttention()

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
        """Compute attention; equal to `EagerAttention` within rounding.

        With bfloat16 on CPUs with AVX512-BF16, attention weights are rounded to bfloat16 before they multiply values.
        """
        if kv_cache is None or not supports(q_THD, v_TKD, form, kv_cache):
            return self._fallback.attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=kv_cache)
        step = self.prepare_step(metadata, kv_cache)
        q_THD, k_TKD, v_TKD = _rows_of(q_THD), _rows_of(k_TKD.to(kv_cache.dtype)), _rows_of(v_TKD)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
        call = layer_call(q_THD, k_TKD, v_TKD, out_THD, form, kv_cache)
        call.threads = step.threads
        if form.bias is not None:
            bias_HX = position_biases(form, q_THD.shape[1], step.longest)
            set_biases(call, bias_HX, step.longest)
        name = KERNEL_NAMES[kv_cache.dtype, kv_cache.cache_dtype]
        kernel = self.kernels.function(name, ctypes.c_void_p, ctypes.c_void_p)
        kernel(ctypes.byref(step.batch), ctypes.byref(call))
        return out_THD

    def prepare_step(self, metadata: AttentionMetadata, kv_cache: KVCache) -> AttentionStep:
        """Return the kernel's arguments that all layers of a step share. `metadata` keeps them for later calls.

        Raises:
            ValueError: in the first call, a slot or block number is outside the KV-cache, or a context is longer than
                its block table. The kernel does not check this, and would corrupt memory.
        """
        if kv_cache not in metadata.kernel_arguments:
            metadata.kernel_arguments[kv_cache] = self._make_step(metadata, kv_cache)
        step: AttentionStep = metadata.kernel_arguments[kv_cache]
        return step

    def _make_step(self, metadata: AttentionMetadata, kv_cache: KVCache) -> AttentionStep:
        slots_T, tables_BN = metadata.slot_mapping_T, metadata.block_tables_BN
        assert slots_T is not None
        assert tables_BN is not None
        slots_T, tables_BN = slots_T.contiguous(), tables_BN.contiguous()
        starts, lengths, longest = array("q", metadata.query_starts), metadata.contexts_B, max(metadata.context_lengths)
        if lengths is None:
            lengths = torch.tensor(metadata.context_lengths)
        batch = AttentionBatch(
            *(len(metadata.query_lengths), len(slots_T), kv_cache.block_size, kv_cache.num_blocks, tables_BN.shape[1]),
            *(starts.buffer_info()[0], lengths.data_ptr(), tables_BN.data_ptr(), slots_T.data_ptr()),
        )
        is_within = self.kernels.function("kvasir_is_within_cache", ctypes.c_void_p, result=ctypes.c_bool)
        if not is_within(ctypes.byref(batch)):
            slots, blocks = (f"{int(x.min())} (lowest) to {int(x.max())} (highest)" for x in (slots_T, tables_BN))
            raise ValueError(
                f"the KV-cache has {kv_cache.num_blocks} blocks of {kv_cache.block_size} slots, but the step uses "
                f"slots {slots}, blocks {blocks}, and {tables_BN.shape[1]} blocks for a context of {longest} tokens"
            )
        return AttentionStep(batch, (starts, lengths, tables_BN, slots_T), longest, torch.get_num_threads())


def supports(q_THD: Tensor, v_TKD: Tensor, form: AttentionForm, kv_cache: KVCache) -> bool:
    """Return whether the native attention kernel supports a layer with this KV-cache.

    Needed: a CPU, dtypes in `KERNEL_NAMES`, heads of 1 to `_LARGEST_HEAD` dimensions, and no DeBERTa bias.
    """
    return (
        kv_cache.keys[0].device.type == "cpu"
        and (kv_cache.dtype, kv_cache.cache_dtype) in KERNEL_NAMES
        and q_THD.dtype == v_TKD.dtype == kv_cache.dtype
        and 0 < q_THD.shape[-1] == v_TKD.shape[-1] <= _LARGEST_HEAD
        and (form.bias is None or isinstance(form.bias, RelativeBias | AlibiBias))
    )


def layer_call(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_THD: Tensor, form: AttentionForm, kv_cache: KVCache
) -> AttentionCall:
    """Return the native kernel's arguments for one layer: pointers into these tensors. Threads and bias are unset."""
    pools = kv_cache.keys[form.layer], kv_cache.values[form.layer]
    new = (x.data_ptr() if kv_cache.is_owner(form.layer) else None for x in (k_TKD, v_TKD))
    return AttentionCall(
        *(q_THD.data_ptr(), *new, *(x.data_ptr() for x in (out_THD, *pools))),
        *(x.stride(0) for x in (q_THD, k_TKD, v_TKD)),
        *(q_THD.shape[1], pools[0].shape[2], q_THD.shape[2], form.window or 0),
        key_scales=kv_cache.key_scales[form.layer].data_ptr(),
        value_scales=kv_cache.value_scales[form.layer].data_ptr(),
        scale=form.scale,
        soft_cap=form.soft_cap or 0,
    )


def _rows_of(x_THD: Tensor) -> Tensor:
    """Return queries, keys or values with each token's heads contiguous in memory; copy only if necessary."""
    _, num_heads, size = x_THD.shape
    if x_THD.stride(2) == 1 and (num_heads == 1 or x_THD.stride(1) == size):
        return x_THD
    return x_THD.contiguous()


def set_biases(call: AttentionCall, bias_HX: Tensor, longest: int) -> None:
    """Point the kernel's arguments for one layer to `bias_HX`, which the caller keeps alive.

    bias_HX: result of `position_biases` for the same `longest`, at least the number of tokens of the longest context.
    """
    call.bias, call.bias_length, call.bias_stride = bias_HX.data_ptr(), longest, bias_HX.shape[1]


def position_biases(form: AttentionForm, num_heads: int, longest: int) -> Tensor:
    """Return the position biases of each head for distances under `longest`, times log2(e): float32, (heads, X).

    Index i of X is for the distance longest - 1 - i. _TILE + _TASK_ROWS zeros follow the bias of distance 0, because
    the kernel reads past that bias.
    """
    assert form.bias is not None
    no_tokens = torch.empty(1, 1, num_heads, 0)
    distances_11S = torch.arange(longest - 1, -1, -1)[None, None]
    bias_HS = form.bias(no_tokens, no_tokens, distances_11S)[0, :, 0].detach().float() * _LOG2_E
    return torch.nn.functional.pad(bias_HS, (0, _TILE + _TASK_ROWS)).contiguous()
