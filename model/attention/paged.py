"""GPU attention over a paged KV-cache: kernels for decodes and for prompt chunks, and the choice among them.

Legend: T packed tokens, B sequences that compute one token, C chunks, X packed tokens of chunks, H query heads,
K key/value heads, D head dimension, S context.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionForm, AttentionMetadata, RaggedView, visible
from model.attention.score_biases import SCORE_BIASES
from model.attention.sdpa import SdpaAttention, causal
from model.config import ModelConfig
from model.system.triton_modules import import_with_triton

# Kernel for sequences that compute one token: (q_BHD, form, positions_B, tables_BN, cache) -> BHD in the values' dtype.
# Each query attends to the positions up to its own, within the window. CUDA graph capture requires that nothing is
# copied to or from the host, and that no shape depends on the contents of a tensor. Table entries after the end of a
# sequence's context may be any valid block.
DecodeKernel = Callable[[Tensor, AttentionForm, Tensor, Tensor, KVCache], Tensor]
# Kernel for prompt chunks: (q_XHD, k_SKD, v_SKD, form, view) -> XHD in the values' dtype. Keys and values are those of
# the chunks' contexts, one context after the other.
ChunkKernel = Callable[[Tensor, Tensor, Tensor, AttentionForm, RaggedView], Tensor]
# Most positions whose keys and values a layer copies from the cache at once. A single longer context is copied whole.
GATHERED_POSITIONS = 32_768
# Largest head of PyTorch's flash attention 2, and the number of which each head is a multiple.
_LARGEST_FLASH_HEAD, _FLASH_MULTIPLE = 256, 8
_flash_forward = torch.ops.aten._flash_attention_forward.default
# One split makes the order of additions batch-invariant. PyTorch 2.11 has no such option.
_FLASH_OPTIONS = {"num_splits": 1} if any(x.name == "num_splits" for x in _flash_forward._schema.arguments) else {}
Kernel = TypeVar("Kernel", DecodeKernel, ChunkKernel)


class PagedAttention:
    """Attention backend for paged GPU caches. See `model.attention.backends.AttentionBackend`.

    The decode kernel reads only tensors whose shapes do not depend on context lengths, so a decode step can be captured
    as a CUDA graph. `SdpaAttention` computes layers with a score bias or soft cap or without keys (D = 0), and
    uncached sequences.
    """

    def __init__(self, decode: DecodeKernel, chunks: ChunkKernel) -> None:
        self._decode = decode
        self._chunks = chunks
        self._others = SdpaAttention()

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
        if kv_cache is None or form.bias is not None or form.soft_cap is not None or q_THD.shape[-1] == 0:
            return self._others.attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=kv_cache)
        assert metadata.slot_mapping_T is not None
        assert metadata.block_tables_BN is not None
        if not form.is_written:
            kv_cache.write(form.layer, metadata.slot_mapping_T, k_TKD, v_TKD)
        if metadata.is_decode:
            return self._decode(q_THD, form, metadata.positions_T, metadata.block_tables_BN, kv_cache)
        view = metadata.ragged_view
        q_XHD = q_THD[view.tokens_X]
        if view.query_lengths == view.context_lengths and kv_cache.cache_dtype is kv_cache.dtype:
            # Whole prompts: the cache has the same numbers.
            out_XHD = self._chunks(q_XHD, k_TKD[view.tokens_X], v_TKD[view.tokens_X], form, view)
        else:
            slots_S = metadata.chunk_slots(kv_cache.block_size)
            parts = [
                self._chunks(q_XHD[tokens], *kv_cache.gather(form.layer, slots_S[positions]), form, group)
                for tokens, positions, group in chunk_groups(metadata)
            ]
            out_XHD = parts[0] if len(parts) == 1 else torch.cat(parts)
        if view.decodes is None:
            return out_XHD
        tokens_B, positions_B, tables_BN = view.decodes
        out_THD = out_XHD.new_empty((len(q_THD), *out_XHD.shape[1:]))
        out_THD[view.tokens_X] = out_XHD
        out_THD[tokens_B] = self._decode(q_THD[tokens_B], form, positions_B, tables_BN, kv_cache)
        return out_THD


def chunk_groups(metadata: AttentionMetadata) -> list[tuple[slice, slice, RaggedView]]:
    """Return a step's chunks in groups with at most `GATHERED_POSITIONS`: tokens X, positions S, and layout of each."""
    view = metadata.ragged_view
    queries, contexts = ([0, *itertools.accumulate(sizes)] for sizes in (view.query_lengths, view.context_lengths))
    firsts = [0]
    for chunk, end in enumerate(contexts[1:]):
        if chunk > firsts[-1] and end - contexts[firsts[-1]] > GATHERED_POSITIONS:
            firsts.append(chunk)
    if len(firsts) == 1:
        return [(slice(None), slice(None), view)]
    if "chunk groups" not in metadata.kernel_arguments:
        metadata.kernel_arguments["chunk groups"] = [
            (
                slice(queries[first], queries[end]),
                slice(contexts[first], contexts[end]),
                replace(
                    view,
                    query_lengths=view.query_lengths[first:end],
                    context_lengths=view.context_lengths[first:end],
                    query_starts=view.query_starts[first : end + 1] - queries[first],
                    context_starts=view.context_starts[first : end + 1] - contexts[first],
                ),
            )
            for first, end in itertools.pairwise([*firsts, len(view.query_lengths)])
        ]
    groups: list[tuple[slice, slice, RaggedView]] = metadata.kernel_arguments["chunk groups"]
    return groups


class Unavailable(Exception):
    """Error if a GPU attention kernel does not support the device, dtype or head dimension; the message says why."""


@dataclass(frozen=True, kw_only=True)
class KernelContext:
    """Device, dtype, block size and model configuration that attention kernels must support."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    block_size: int


@dataclass(frozen=True)
class SelectedKernels:
    """Chosen backend and its kernels' names. left_out: better kernels that are not supported, as "name: reason"."""

    backend: PagedAttention
    decode: str
    chunks: str
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        return f"paged (decode: {self.decode}, prompts: {self.chunks})"


def fits(config: ModelConfig) -> bool:
    """Return True if paged kernels support a model: one without average attention, score biases and score cap."""
    return config.key_dim > 0 and config.position not in SCORE_BIASES and config.score_soft_cap is None


def gathered(q_BHD: Tensor, form: AttentionForm, positions_B: Tensor, tables_BN: Tensor, kv_cache: KVCache) -> Tensor:
    """Compute decode attention with PyTorch's fused kernel, on any device, over copies of all slots in block tables.

    A slot that a query does not see may hold NaN from another sequence, so the query's own slot is read instead.
    """
    slots_BS = kv_cache.slots_of(tables_BN)
    distances_BS = positions_B[:, None] - torch.arange(slots_BS.shape[1], device=q_BHD.device)
    visible_BS = visible(distances_BS, form.window)
    seen_BS = torch.where(visible_BS, slots_BS, slots_BS.gather(1, positions_B[:, None]))
    found = kv_cache.gather(form.layer, seen_BS.flatten())
    k_BSKD, v_BSKD = (torch.unflatten(x_SKD, 0, slots_BS.shape) for x_SKD in found)
    mask_BXXS = visible_BS[:, None, None]
    # The G query heads of a group take the dimension of query tokens, because they see the same keys.
    q_BKGD = torch.unflatten(q_BHD, 1, (k_BSKD.shape[2], -1))
    k_BKSD, v_BKSD = k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2)
    return scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD, attn_mask=mask_BXXS, scale=form.scale).flatten(1, 2)


def one_by_one(q_XHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, form: AttentionForm, view: RaggedView) -> Tensor:
    """Compute the attention of prompt chunks with PyTorch's fused kernel, one chunk after the other, on any device."""
    contexts = view.context_lengths
    parts = zip(q_XHD.split(view.query_lengths), k_SKD.split(contexts), v_SKD.split(contexts), strict=True)
    return torch.cat([causal(q_QHD, k_SKD, v_SKD, form) for q_QHD, k_SKD, v_SKD in parts])


def flash_varlen(q_XHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, form: AttentionForm, view: RaggedView) -> Tensor:
    """Compute the attention of all prompt chunks in one call of PyTorch's flash attention 2.

    The operator is called without `torch.nn.attention.varlen` around it, whose dispatch takes up to 0.1 ms of the host
    per call (PyTorch #139500), and whose import, with torch._dynamo, takes as long as all other imports of a worker.
    """
    longest = max(view.query_lengths), max(view.context_lengths)
    before = -1 if form.window is None else form.window - 1  # positions that a token sees before its own
    out_XHD: Tensor = _flash_forward(
        q_XHD, k_SKD, v_SKD, view.query_starts, view.context_starts, *longest,
        0.0, form.window is None, False,  # dropout, is_causal, return_debug_mask
        scale=form.scale, window_size_left=before, window_size_right=0, **_FLASH_OPTIONS,
    )[0]  # fmt: skip
    return out_XHD


def _triton(context: KernelContext) -> DecodeKernel:
    if context.device.type != "cuda":
        raise Unavailable("the kernel needs a CUDA device")
    if (triton_decode := import_with_triton("model.attention.triton_decode")) is None:
        raise Unavailable("triton is not installed")
    size = context.config.largest_head_dim
    if not triton_decode.supports(context.dtype, size):
        raise Unavailable(f"the kernel does not support {context.dtype} with head dimension {size}")
    kernel: DecodeKernel = triton_decode.attend
    return kernel


def _varlen(context: KernelContext) -> ChunkKernel:
    if context.device.type != "cuda":
        raise Unavailable("the kernel needs a CUDA device")
    if context.dtype not in (torch.bfloat16, torch.float16):
        raise Unavailable(f"flash attention does not support {context.dtype}")
    size = context.config.largest_head_dim
    if size > _LARGEST_FLASH_HEAD or size % _FLASH_MULTIPLE:
        raise Unavailable(f"flash attention does not support head dimension {size}")
    return flash_varlen


# Best first. Each function returns its kernel or raises `Unavailable`; the last kernel supports every device.
DECODE_KERNELS: Mapping[str, Callable[[KernelContext], DecodeKernel]] = {
    "triton": _triton,
    "gathered": lambda _: gathered,
}
CHUNK_KERNELS: Mapping[str, Callable[[KernelContext], ChunkKernel]] = {
    "varlen": _varlen,
    "one by one": lambda _: one_by_one,
}


def choose(context: KernelContext) -> SelectedKernels:
    """Return paged attention with the best kernels that support the device, dtype and model, and the kernels' names."""
    left_out: list[str] = []
    decode_name, decode = _first(DECODE_KERNELS, context, left_out)
    chunk_name, chunks = _first(CHUNK_KERNELS, context, left_out)
    return SelectedKernels(PagedAttention(decode, chunks), decode_name, chunk_name, tuple(left_out))


def _first(
    kernels: Mapping[str, Callable[[KernelContext], Kernel]], context: KernelContext, left_out: list[str]
) -> tuple[str, Kernel]:
    for name, make in kernels.items():
        try:
            return name, make(context)
        except Unavailable as error:
            left_out.append(f"{name}: {error}")
    raise AssertionError("no attention kernel supports this device; the last kernel of each table must")
