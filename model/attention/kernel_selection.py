"""Kernels for attention over a paged cache, best first, and the choice of those that work on this device.

A kernel is chosen if its requirements are met and a small random case, computed on the device, agrees with the
reference implementation. A kernel that fails or disagrees is left out with a reason, and the next kernel is tried.
The check is needed because kernels are compiled for GPU models on which they were never tested.

Legend: B sequences, X packed tokens of chunks, H query heads, K key/value heads, D head dimension, S context.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from model.attention.eager import EagerAttention
from model.attention.flash_varlen import VarlenChunks, VarlenError, varlen_attn
from model.attention.kv_cache import KVCache
from model.attention.layer_spec import AttentionForm, visible
from model.attention.metadata import AttentionMetadata
from model.attention.packed_layout import RaggedView
from model.attention.paged import ChunkKernel, DecodeKernel, PagedAttention
from model.attention.score_biases import SCORE_BIASES
from model.attention.sdpa import causal
from model.config import ModelConfig

try:
    from model.attention import triton_decode
except ImportError:  # triton is installed only with PyTorch for CUDA
    triton_decode = None  # type: ignore[assignment]

# Largest error by dtype, as a fraction of the largest absolute output of the reference implementation. Kernels sum in
# another order and round weights to the dtype.
_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4, torch.float64: 1e-10}
# Sequences of a check: context lengths, and the number of query tokens of each.
_CONTEXTS = (1, 5, 16, 17, 133, 401, 700)
_QUERIES = (1, 1, 7, 17, 1, 120, 3)

Way = TypeVar("Way", DecodeKernel, ChunkKernel)


class Unavailable(Exception):
    """A kernel cannot be used on this device; the message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class KernelContext:
    """Device, dtype, block size and model configuration that attention kernels must support."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    block_size: int


@dataclass(frozen=True, kw_only=True)
class SelectedKernels:
    """Chosen backend.

    Attributes:
        decode: name of the decode kernel.
        chunks: name of the kernel for prompt chunks.
        left_out: the kernels that were tried before and do not work, each with its reason.
    """

    backend: PagedAttention
    decode: str
    chunks: str
    left_out: tuple[str, ...]

    @property
    def reads_in_place(self) -> bool:
        """Return whether decoding reads keys from the cache without copying them first."""
        return self.decode == "triton"

    def __str__(self) -> str:
        return f"paged (decode: {self.decode}, prompts: {self.chunks})"


def fits(config: ModelConfig) -> bool:
    """Return whether the kernels support the model: neither biases in the scores nor average attention (D = 0)."""
    return config.key_dim > 0 and config.position not in SCORE_BIASES


def gathered(q_BHD: Tensor, form: AttentionForm, positions_B: Tensor, tables_BN: Tensor, kv_cache: KVCache) -> Tensor:
    """Decode with PyTorch's fused kernel over copies of all slots in the block tables. A `DecodeKernel` for any device.

    Slots that a query does not see are replaced by the query's own slot: a hidden slot may hold NaN from another
    sequence.
    """
    size = kv_cache.block_size
    slots_BS = (tables_BN[:, :, None] * size + torch.arange(size, device=q_BHD.device)).flatten(1)
    distances_BS = positions_B[:, None] - torch.arange(slots_BS.shape[1], device=q_BHD.device)
    visible_BS = visible(distances_BS, form.window)
    seen_BS = torch.where(visible_BS, slots_BS, slots_BS.gather(1, positions_B[:, None]))
    found = kv_cache.gather_slots(form.layer, seen_BS.flatten())
    k_BSKD, v_BSKD = (torch.unflatten(x_SKD, 0, slots_BS.shape) for x_SKD in found)
    mask_BXXS = visible_BS[:, None, None]
    # The G query heads of a group take the dimension of query tokens, because they see the same keys.
    q_BKGD = torch.unflatten(q_BHD, 1, (k_BSKD.shape[2], -1))
    k_BKSD, v_BKSD = k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2)
    return scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD, attn_mask=mask_BXXS, scale=form.scale).flatten(1, 2)


def one_by_one(q_XHD: Tensor, form: AttentionForm, view: RaggedView, kv_cache: KVCache) -> Tensor:
    """Compute prompt chunks with PyTorch's fused kernel, one after the other. A `ChunkKernel` for any device."""
    k_SKD, v_SKD = kv_cache.gather_slots(form.layer, view.slots_S)
    contexts = view.context_lengths
    parts = zip(q_XHD.split(view.query_lengths), k_SKD.split(contexts), v_SKD.split(contexts), strict=True)
    return torch.cat([causal(q_QHD, k_SKD, v_SKD, form) for q_QHD, k_SKD, v_SKD in parts])


def _triton(place: KernelContext) -> DecodeKernel:
    if triton_decode is None:
        raise Unavailable("triton is not installed")
    if place.device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    if not triton_decode.supports(place.dtype, place.config.head_dim):
        raise Unavailable(f"does not support {place.dtype} with head dimension {place.config.head_dim}")
    return triton_decode.attend


def _varlen(place: KernelContext) -> ChunkKernel:
    if place.device.type != "cuda":
        raise Unavailable("needs a CUDA device")
    if place.dtype not in (torch.bfloat16, torch.float16):
        raise Unavailable(f"flash attention does not support {place.dtype}")
    try:
        return VarlenChunks(varlen_attn())
    except VarlenError as error:
        raise Unavailable(str(error)) from error


DECODE_WAYS: Mapping[str, Callable[[KernelContext], DecodeKernel]] = {
    "triton": _triton,
    "gathered": lambda place: gathered,
}
CHUNK_WAYS: Mapping[str, Callable[[KernelContext], ChunkKernel]] = {
    "varlen": _varlen,
    "one by one": lambda place: one_by_one,
}


def choose(
    place: KernelContext,
    decode_ways: Mapping[str, Callable[[KernelContext], DecodeKernel]] = DECODE_WAYS,
    chunk_ways: Mapping[str, Callable[[KernelContext], ChunkKernel]] = CHUNK_WAYS,
) -> SelectedKernels:
    """Return a backend made of the first kernel of each table that works on this device.

    Raises:
        RuntimeError: a table has no kernel that works; the message gives the reason for each kernel.
    """
    left_out: list[str] = []

    def decoding(way: DecodeKernel) -> PagedAttention:
        return PagedAttention(way, one_by_one)

    def chunking(way: ChunkKernel) -> PagedAttention:
        return PagedAttention(gathered, way)

    decode_name, decode = _first(decode_ways, place, decoding, queries=(1,) * len(_CONTEXTS), left_out=left_out)
    chunk_name, chunks = _first(chunk_ways, place, chunking, queries=_QUERIES, left_out=left_out)
    return SelectedKernels(
        backend=PagedAttention(decode, chunks), decode=decode_name, chunks=chunk_name, left_out=tuple(left_out)
    )


def _first(
    ways: Mapping[str, Callable[[KernelContext], Way]],
    place: KernelContext,
    whole: Callable[[Way], PagedAttention],
    *,
    queries: tuple[int, ...],
    left_out: list[str],
) -> tuple[str, Way]:
    for name, make in ways.items():
        try:
            way = make(place)
            check(whole(way), place, queries)
        except Exception as error:  # a third-party compiler, driver or kernel may raise anything
            left_out.append(f"{name}: {_line(error)}")
        else:
            return name, way
    raise RuntimeError(f"no attention kernel works on this device: {'; '.join(left_out)}")


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


@torch.inference_mode()
def check(backend: PagedAttention, place: KernelContext, queries: tuple[int, ...] = _QUERIES) -> None:
    """Compare a backend with the reference implementation on random data with the model's heads.

    Every window that a layer of the model has is checked, on the device.

    Raises:
        Unavailable: an output is not finite, or differs by more than the tolerance of the dtype.
    """
    config = place.config
    for window in {config.window(layer) for layer in range(config.num_layers)}:
        form = AttentionForm(layer=0, scale=config.effective_score_scale, window=window, bias=None)
        found, expected = _both(backend, form, place, queries)
        if not torch.isfinite(found).all():
            raise Unavailable("returns NaN or infinity")
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        if error > _TOLERANCES[place.dtype]:
            raise Unavailable(f"error of {error:.1e} relative to the largest output (window {window})")


def _both(
    backend: PagedAttention, form: AttentionForm, place: KernelContext, queries: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return the outputs of the backend and of the reference implementation, float32 on the CPU.

    The blocks of each sequence are scattered over the cache. Slots after the end of the contexts hold NaN, as an
    earlier sequence with non-finite values may leave them.
    """
    size, config = place.block_size, place.config
    generator = torch.Generator().manual_seed(len(queries))
    needs = [-(-context // size) for context in _CONTEXTS]
    blocks = torch.randperm(sum(needs) + 1, generator=generator)
    spare, owned = int(blocks[-1]), blocks[:-1].split(needs)
    tables_BN = torch.full((len(needs), max(needs)), spare)
    for row, its_blocks in enumerate(owned):
        tables_BN[row, : len(its_blocks)] = its_blocks
    pairs = list(zip(queries, _CONTEXTS, strict=True))
    positions_T = torch.cat([torch.arange(context - query, context) for query, context in pairs])
    row_of_T = torch.arange(len(pairs)).repeat_interleave(torch.tensor(queries))
    metadata = AttentionMetadata(
        query_lengths=queries,
        context_lengths=_CONTEXTS,
        positions_T=positions_T,
        slot_mapping_T=tables_BN[row_of_T, positions_T // size] * size + positions_T % size,
        block_tables_BN=tables_BN,
    ).to(place.device)
    pool_shape = (len(blocks), size, config.num_kv_heads, config.head_dim)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    shapes = [(len(positions_T), n, config.head_dim) for n in heads]
    random = [torch.randn(shape, generator=generator) for shape in (pool_shape, pool_shape, *shapes)]
    known = torch.zeros(len(blocks) * size, dtype=torch.bool)
    for row, context in enumerate(_CONTEXTS):
        positions = torch.arange(context)
        known[tables_BN[row, positions // size] * size + positions % size] = True
    for pool_NPKD in random[:2]:
        pool_NPKD.flatten(0, 1)[~known] = torch.nan
    keys, values, q_THD, k_TKD, v_TKD = (x.to(place.device, place.dtype) for x in random)
    outputs = []
    for attention in (backend, EagerAttention()):
        cache = KVCache(config, num_blocks=len(blocks), block_size=size, dtype=place.dtype, device=place.device)
        cache.keys_LNPKD[0], cache.values_LNPKD[0] = keys, values
        out_THD = attention.attend(q_THD, k_TKD, v_TKD, form=form, metadata=metadata, kv_cache=cache)
        outputs.append(out_THD.float().cpu())
    return outputs[0], outputs[1]
