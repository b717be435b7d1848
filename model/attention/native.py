"""Attention on CPUs by a kernel of our own that reads the cache's blocks where they lie: model/kernels/attention.cpp.

No padding, no copies of keys; each sequence, and each key/value head, is computed on its own, in an order of sums that
follows from a token's position alone. So a token's output has the same bits whatever the batch, the number of threads,
and how a prompt was cut into chunks, and the same when a token that was decoded comes again in a prompt.

What the kernel does not know goes to PyTorch's: sequences without a cache (training), other devices, float64,
keys of no numbers (average attention), heads over 256, biases that depend on content (DeBERTa). Without loaded kernels
everything does.

Legend: T packed tokens, B sequences, N blocks of a table, H query heads, K key/value heads, D head dimension.
"""

import ctypes
import threading
from array import array
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.attention.biases import AlibiBias, RelativeBias
from model.attention.form import AttentionForm
from model.attention.metadata import AttentionMetadata
from model.attention.sdpa import SdpaAttention
from model.kernels.loading import KERNELS, KernelLibrary, Kernels
from model.kv_cache import KVCache

# By what is computed with, and what the cache holds.
KERNEL_NAMES = {
    (torch.float32, torch.float32): "kvasir_attention_float32",
    (torch.float32, torch.float16): "kvasir_attention_float32_over_float16",
    (torch.bfloat16, torch.bfloat16): "kvasir_attention_bfloat16",
}
_CHECK = "kvasir_is_within_cache"
_LARGEST_HEAD = 256
_LOG2_E = 1.4426950408889634  # the kernel's powers are of two
# Keys and rows of queries that it takes at once: of the last key's biases it may read so many behind the last, of a row
# that does not see that key yet.
_TILE, _TASK_ROWS = 64, 96
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Batch(ctypes.Structure):
    """`Batch` in attention.cpp."""

    _fields_ = (
        *((name, _INT) for name in ("num_sequences", "num_tokens", "block_size", "num_blocks", "table_width")),
        *((name, _POINTER) for name in ("query_starts", "context_lengths", "tables", "slots")),
    )


class AttentionCall(ctypes.Structure):
    """`Layer` in attention.cpp: one layer of a step."""

    _fields_ = (
        *((name, _POINTER) for name in ("q", "k", "v", "out", "keys", "values")),
        *((name, _INT) for name in ("q_stride", "k_stride", "v_stride", "num_heads", "num_kv_heads", "head_size")),
        *((name, _INT) for name in ("window", "bias_length", "bias_stride", "threads")),
        ("bias", _POINTER),
        ("scale", ctypes.c_float),
    )


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What all layers of a step share. `loaded` is None where it goes the other way; `held` is what `batch` points to.

    longest: the longest context (tokens).
    """

    metadata: AttentionMetadata
    loaded: KernelLibrary | None
    batch: Any
    held: tuple[object, ...]
    longest: int
    threads: int


class _Latest(threading.local):
    """The step that a thread is in."""

    step: _Step | None = None


class NativeAttention:
    """See `model.attention.interface.AttentionBackend`.

    Args:
        kernels: where the library is, or will be.
    """

    def __init__(self, kernels: Kernels = KERNELS) -> None:
        self.kernels = kernels
        self._otherwise = SdpaAttention()
        self._latest = _Latest()

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
        """Equal to the eager oracle within rounding; of bfloat16, weights are rounded before values are summed.

        Raises:
            ValueError: a slot or a block that the cache does not have.
        """
        if kv_cache is not None and is_known(q_THD, v_TKD, form, kv_cache):
            step = self.step_of(metadata, kv_cache)
            if step.loaded is not None:
                return _attend(q_THD, k_TKD, v_TKD, form, step, kv_cache)
        return self._otherwise.attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=kv_cache)

    def step_of(self, metadata: AttentionMetadata, kv_cache: KVCache) -> _Step:
        """What all layers of this step share. Raises ValueError: a slot or a block that the cache does not have."""
        step = self._latest.step
        if step is None or step.metadata is not metadata:
            step = self._latest.step = _make_step(metadata, kv_cache, self.kernels.loaded)
        return step


def is_known(q_THD: Tensor, v_TKD: Tensor, form: AttentionForm, kv_cache: KVCache) -> bool:
    """Whether the kernel knows such a layer."""
    return (
        kv_cache.keys_LNPKD.device.type == "cpu"
        and (kv_cache.dtype, kv_cache.held_as) in KERNEL_NAMES
        and q_THD.dtype == v_TKD.dtype == kv_cache.dtype
        and 0 < q_THD.shape[-1] == v_TKD.shape[-1] <= _LARGEST_HEAD
        and (form.bias is None or isinstance(form.bias, RelativeBias | AlibiBias))
    )


def _make_step(metadata: AttentionMetadata, kv_cache: KVCache, library: KernelLibrary | None) -> _Step:
    """Raises ValueError: a slot or a block that the cache does not have; the kernel would write over other memory."""
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
    if library is None or not library.function(_CHECK, _POINTER, result=ctypes.c_bool)(ctypes.byref(batch)):
        _check(slots_T, tables_BN, max(metadata.context_lengths), kv_cache)
    return _Step(
        metadata=metadata,
        loaded=library,
        batch=batch,
        held=(starts, lengths, tables_BN, slots_T),
        longest=max(metadata.context_lengths),
        threads=torch.get_num_threads(),
    )


def _check(slots_T: Tensor, tables_BN: Tensor, longest: int, kv_cache: KVCache) -> None:
    """Say what is not in the cache. Raises ValueError."""
    counts = {"slots": (slots_T, kv_cache.num_blocks * kv_cache.block_size), "blocks": (tables_BN, kv_cache.num_blocks)}
    for name, (numbers, count) in counts.items():
        lowest, highest = (int(x) for x in torch.aminmax(numbers))
        if lowest < 0 or highest >= count:
            raise ValueError(f"{name} {lowest} to {highest}, of a cache that has {count}")
    widest = -(-longest // kv_cache.block_size)
    if tables_BN.shape[1] < widest:
        raise ValueError(f"tables of {tables_BN.shape[1]} blocks; the longest context has {widest}")


def _attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, form: AttentionForm, step: _Step, kv_cache: KVCache) -> Tensor:
    """One layer by the kernel, which also writes keys and values into the cache."""
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
    assert step.loaded is not None
    kernel = step.loaded.function(KERNEL_NAMES[kv_cache.dtype, kv_cache.held_as], _POINTER, _POINTER)
    kernel(ctypes.byref(step.batch), ctypes.byref(layer))
    return out_THD


def _rows_of(x_THD: Tensor) -> Tensor:
    """The same, with each token's numbers in one piece: what was split of a wider row stays there."""
    _, num_heads, size = x_THD.shape
    if x_THD.stride(2) == 1 and (num_heads == 1 or x_THD.stride(1) == size):
        return x_THD
    return x_THD.contiguous()


def _biases(form: AttentionForm, num_heads: int, longest: int) -> Tensor:
    """What a form adds to each head's scores, HX float32, in powers of two: longest - 1 - d positions back at d."""
    assert form.bias is not None
    nobody = torch.empty(1, 1, num_heads, 0)
    distances_11S = torch.arange(longest - 1, -1, -1)[None, None]
    bias_HS = form.bias(nobody, nobody, distances_11S)[0, :, 0].detach().float() * _LOG2_E
    return torch.nn.functional.pad(bias_HS, (0, _TILE + _TASK_ROWS)).contiguous()
