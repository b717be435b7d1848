"""Native CPU attention that reads the blocks of the KV-cache in place: model/kernels/src/attention.cpp.

The kernel neither pads nor copies keys. It computes each sequence and each key/value head separately, in an order of
sums that depends only on a token's position. A token's output is therefore bitwise identical for every batch, number
of threads and chunking of the prompt. It is also identical whether the token was decoded or is part of a prompt.

`SdpaAttention` computes what the kernel does not support:

- sequences without a cache (training), and devices other than CPUs
- float64
- keys with D = 0 (average attention), and head dimensions over 256
- biases that depend on content (DeBERTa)

Legend: T packed tokens, B sequences, N blocks of a table, H query heads, K key/value heads, D head dimension.
"""

import ctypes
from array import array
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.layer_spec import AttentionForm
from model.attention.metadata import AttentionMetadata
from model.attention.score_biases import AlibiBias, RelativeBias
from model.attention.sdpa import SdpaAttention
from model.kernels.kernel_library import KernelLibrary

# By the dtypes of computation and of the KV-cache.
KERNEL_NAMES = {
    (torch.float32, torch.float32): "kvasir_attention_float32",
    (torch.float32, torch.float16): "kvasir_attention_float32_over_float16",
    (torch.bfloat16, torch.bfloat16): "kvasir_attention_bfloat16",
}
_CHECK = "kvasir_is_within_cache"
_LARGEST_HEAD = 256
_LOG2_E = 1.4426950408889634  # the kernel computes 2^x, not e^x
# Sizes of the kernel's tiles: keys, and rows of queries in a task. The kernel reads a row's biases for the whole tile,
# also for keys after the row's position. It may read up to _TILE + _TASK_ROWS floats past the bias of distance 0.
_TILE, _TASK_ROWS = 64, 96
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Batch(ctypes.Structure):
    """Mirror of `AttentionBatch` in attention.h."""

    _fields_ = (
        *((name, _INT) for name in ("num_sequences", "num_tokens", "block_size", "num_blocks", "table_width")),
        *((name, _POINTER) for name in ("query_starts", "context_lengths", "tables", "slots")),
    )


class AttentionCall(ctypes.Structure):
    """Mirror of `AttentionCall` in attention.h: one layer of a step."""

    _fields_ = (
        *((name, _POINTER) for name in ("q", "k", "v", "out", "keys", "values")),
        *((name, _INT) for name in ("q_stride", "k_stride", "v_stride", "num_heads", "num_kv_heads", "head_size")),
        *((name, _INT) for name in ("window", "bias_length", "bias_stride", "threads")),
        ("bias", _POINTER),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Kernel arguments that all layers of a step share.

    Attributes:
        library: the kernel library.
        batch: the `_Batch` passed to the kernel.
        held: objects that own the memory `batch` points to.
        longest: length of the longest context, in tokens.
    """

    library: KernelLibrary
    batch: Any
    held: tuple[object, ...]
    longest: int
    threads: int


class NativeAttention:
    """Native CPU attention backend. See `model.attention.backends.AttentionBackend`.

    Args:
        library: the kernel library.
    """

    def __init__(self, library: KernelLibrary) -> None:
        self.library = library
        self._otherwise = SdpaAttention()

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

        With bfloat16 on CPUs with AVX512-BF16, weights are rounded to bfloat16 before they multiply values.

        Raises:
            ValueError: a slot or a block is outside the cache.
        """
        if kv_cache is not None and is_known(q_THD, v_TKD, form, kv_cache):
            return _attend(q_THD, k_TKD, v_TKD, form, self.step_of(metadata, kv_cache), kv_cache)
        return self._otherwise.attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=kv_cache)

    def step_of(self, metadata: AttentionMetadata, kv_cache: KVCache) -> _Step:
        """Return the kernel arguments that all layers of this step share, cached in the step's metadata.

        Raises:
            ValueError: a slot or a block is outside the cache.
        """
        key = self.library, kv_cache
        if key not in metadata.kernel_arguments:
            metadata.kernel_arguments[key] = _make_step(metadata, kv_cache, self.library)
        step: _Step = metadata.kernel_arguments[key]
        return step


def is_known(q_THD: Tensor, v_TKD: Tensor, form: AttentionForm, kv_cache: KVCache) -> bool:
    """Return whether the kernel supports the layer and the cache."""
    return (
        kv_cache.keys_LNPKD.device.type == "cpu"
        and (kv_cache.dtype, kv_cache.cache_dtype) in KERNEL_NAMES
        and q_THD.dtype == v_TKD.dtype == kv_cache.dtype
        and 0 < q_THD.shape[-1] == v_TKD.shape[-1] <= _LARGEST_HEAD
        and (form.bias is None or isinstance(form.bias, RelativeBias | AlibiBias))
    )


def _make_step(metadata: AttentionMetadata, kv_cache: KVCache, library: KernelLibrary) -> _Step:
    """Make the kernel arguments of a step.

    Raises:
        ValueError: a slot or a block is outside the cache. The kernel does not check, and would corrupt memory.
    """
    slots_T, tables_BN = metadata.slot_mapping_T, metadata.block_tables_BN
    assert slots_T is not None
    assert tables_BN is not None
    slots_T, tables_BN = slots_T.contiguous(), tables_BN.contiguous()
    starts, lengths = array("q", metadata.query_starts), metadata.contexts_B
    if lengths is None:
        lengths = torch.tensor(metadata.context_lengths)
    batch = _Batch(
        len(metadata.query_lengths),
        len(slots_T),
        kv_cache.block_size,
        kv_cache.num_blocks,
        tables_BN.shape[1],
        starts.buffer_info()[0],
        lengths.data_ptr(),
        tables_BN.data_ptr(),
        slots_T.data_ptr(),
    )
    if not library.function(_CHECK, _POINTER, result=ctypes.c_bool)(ctypes.byref(batch)):
        _check(slots_T, tables_BN, max(metadata.context_lengths), kv_cache)
    return _Step(
        library=library,
        batch=batch,
        held=(starts, lengths, tables_BN, slots_T),
        longest=max(metadata.context_lengths),
        threads=torch.get_num_threads(),
    )


def _check(slots_T: Tensor, tables_BN: Tensor, longest: int, kv_cache: KVCache) -> None:
    """Raise ValueError if a slot, a block or the longest context does not fit the cache or the block tables."""
    counts = {"slots": (slots_T, kv_cache.num_blocks * kv_cache.block_size), "blocks": (tables_BN, kv_cache.num_blocks)}
    for name, (numbers, count) in counts.items():
        lowest, highest = (int(x) for x in torch.aminmax(numbers))
        if lowest < 0 or highest >= count:
            raise ValueError(f"{name} range from {lowest} to {highest}, but the cache has {count}")
    widest = -(-longest // kv_cache.block_size)
    if tables_BN.shape[1] < widest:
        raise ValueError(f"block tables have {tables_BN.shape[1]} blocks, but the longest context needs {widest}")


def _attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, form: AttentionForm, step: _Step, kv_cache: KVCache) -> Tensor:
    """Run the kernel for one layer; it also writes keys and values to the cache."""
    keys_NPKD, values_NPKD = kv_cache.keys_LNPKD[form.layer], kv_cache.values_LNPKD[form.layer]
    q_THD, k_TKD, v_TKD = _rows_of(q_THD), _rows_of(k_TKD.to(kv_cache.dtype)), _rows_of(v_TKD)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype)
    bias_HX = None if form.bias is None else _biases(form, q_THD.shape[1], step.longest)
    layer = AttentionCall(
        *(x.data_ptr() for x in (q_THD, k_TKD, v_TKD, out_THD, keys_NPKD, values_NPKD)),
        *(x.stride(0) for x in (q_THD, k_TKD, v_TKD)),
        q_THD.shape[1],
        k_TKD.shape[1],
        q_THD.shape[2],
        form.window or 0,
        step.longest,
        0 if bias_HX is None else bias_HX.shape[1],
        step.threads,
        None if bias_HX is None else bias_HX.data_ptr(),
        form.scale,
    )
    kernel = step.library.function(KERNEL_NAMES[kv_cache.dtype, kv_cache.cache_dtype], _POINTER, _POINTER)
    kernel(ctypes.byref(step.batch), ctypes.byref(layer))
    return out_THD


def _rows_of(x_THD: Tensor) -> Tensor:
    """Return the tensor with contiguous heads for each token; copy only if necessary.

    Tokens may have any stride, so a slice of wider rows is not copied.
    """
    _, num_heads, size = x_THD.shape
    if x_THD.stride(2) == 1 and (num_heads == 1 or x_THD.stride(1) == size):
        return x_THD
    return x_THD.contiguous()


def _biases(form: AttentionForm, num_heads: int, longest: int) -> Tensor:
    """Return the bias of each head, HX float32, multiplied by log2(e). Index i holds distance longest - 1 - i.

    X is longest + _TILE + _TASK_ROWS: the kernel reads past the bias of distance 0.
    """
    assert form.bias is not None
    no_tokens = torch.empty(1, 1, num_heads, 0)
    distances_11S = torch.arange(longest - 1, -1, -1)[None, None]
    bias_HS = form.bias(no_tokens, no_tokens, distances_11S)[0, :, 0].detach().float() * _LOG2_E
    return torch.nn.functional.pad(bias_HS, (0, _TILE + _TASK_ROWS)).contiguous()
