"""KV-cache storage: a pool of fixed-size blocks, as in PagedAttention (Kwon et al. 2023, arXiv 2309.06180).

Legend: N blocks, P slots per block, K key/value heads, D head dimension, T packed tokens, B sequences,
S = blocks per sequence * P.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from model.config import ModelConfig
from model.config_enums import AttentionKind
from model.system import memory_pages

# Vectors whose largest absolute value is below this are stored as zeros in int8.
_SMALLEST = 1e-30


def quantized(x_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys or values in int8, TKD, and the float32 scale of each vector, TK: x = scale * code.

    Codes are rounded to nearest, ties to even. The number of largest magnitude in a vector becomes 127 or -127. A
    vector with NaN or infinity has the scale NaN, so all its numbers are read as NaN.
    """
    x_TKD = x_TKD.float()
    most_TK = x_TKD.abs().amax(-1) if x_TKD.shape[-1] else x_TKD.new_zeros(x_TKD.shape[:-1])
    scales_TK = (most_TK + 0 * most_TK).clamp(min=_SMALLEST) / 127
    return (x_TKD / scales_TK[..., None]).round().to(torch.int8), scales_TK


def rounded(x: Tensor, cache_dtype: torch.dtype) -> Tensor:
    """Round keys or values as a KV-cache does: to nearest, ties to even; NaN stays NaN.

    The result has the dtype of the cache. For int8, it is dequantized again, to the dtype of x; see `quantized`.
    """
    if cache_dtype is torch.int8:
        codes, scales = quantized(x)
        return (codes * scales[..., None]).to(x.dtype)
    # For float16, numbers beyond 65,504 become 65,504: an infinite key would turn the output into NaN.
    if cache_dtype is torch.float16 and x.dtype is not cache_dtype:
        most = torch.finfo(cache_dtype).max
        x = x.clamp(-most, most)
    return x.to(cache_dtype)


class KVCache:
    """Keys and values of up to `num_blocks * block_size` tokens in all layers of a model.

    Average attention (equal weights, no keys) stores values only: its keys have the dimension D = 0. A layer that reads
    the keys and values of an earlier layer (`ModelConfig.kv_source`) has no memory of its own. Its pools are those of
    the earlier layer, and only that layer writes to them.

    keys, values: pool of each layer, with the shape NPKD.
    key_scales, value_scales: scales of each layer, NPK; empty unless the cache is int8.

    dtype: dtype of the tensors that `write` gets and `gather` returns: the model's.
    cache_dtype: dtype in which keys and values are kept in memory; None: `dtype`. With int8, each key and each value
        has a float32 scale. Float16 scales would overflow or lose bits for vectors of unusual size, and would save
        only 3 % of the memory at D = 64.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a KV-cache needs num_blocks and block_size over 0, not {num_blocks} and {block_size}")
        self.dtype = dtype
        self.cache_dtype = cache_dtype or dtype

        def zeros(*shape: int, dtype: torch.dtype = self.cache_dtype) -> Tensor:
            # Zeros, not empty: padding reads unwritten slots, and 0 * NaN is NaN.
            on_cpu = torch.device(device).type == "cpu"
            return memory_pages.zeros(shape, dtype) if on_cpu else torch.zeros(shape, dtype=dtype, device=device)

        self._sources = [config.kv_source(layer) for layer in range(config.num_layers)]
        heads, has_keys = config.num_kv_heads, config.attention is not AttentionKind.AVERAGE
        sizes = [config.head_dim_of(layer) for layer in self._sources]

        def pools(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
            owned = {layer: shape for layer, shape in enumerate(shapes) if self._sources[layer] == layer}
            made = {layer: zeros(num_blocks, *shape, dtype=dtype) for layer, shape in owned.items()}
            return [made[source] for source in self._sources]

        self.keys = pools(((block_size, heads, size * has_keys) for size in sizes), self.cache_dtype)
        self.values = pools(((block_size, heads, size) for size in sizes), self.cache_dtype)
        # A head's scales of a block are contiguous in memory, because kernels read many tokens of a head.
        num_scales = block_size if self.cache_dtype is torch.int8 else 0
        self.key_scales, self.value_scales = (
            [pool.transpose(1, 2) for pool in pools([(heads, num_scales)] * len(sizes), torch.float32)]
            for _ in range(2)
        )
        self.num_blocks = num_blocks
        self.block_size = block_size

    @property
    def num_bytes(self) -> int:
        """Return the size of the KV-cache in bytes."""
        kinds = self.keys, self.values, self.key_scales, self.value_scales
        return sum(pools[layer].nbytes for pools in kinds for layer in set(self._sources))

    def write(self, layer: int, slot_mapping_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Write each token's key and value in one layer to the token's cache slot (block * block_size + offset).

        Keys and values are rounded to the cache's dtype, as by `rounded`, or quantized for an int8 cache. Nothing is
        written for a layer that reads the keys and values of an earlier layer.
        """
        if not self.is_owner(layer):
            return
        keys, values = (self.keys, self.key_scales), (self.values, self.value_scales)
        for (pools, scales), new_TKD in ((keys, k_TKD), (values, v_TKD)):
            if self.cache_dtype is torch.int8:
                new_TKD, scales[layer][self._blocks_and_offsets(slot_mapping_T)] = quantized(new_TKD)
            else:
                new_TKD = rounded(new_TKD, self.cache_dtype)
            pools[layer].flatten(0, 1).index_copy_(0, slot_mapping_T, new_TKD)

    def is_owner(self, layer: int) -> bool:
        """Return whether a layer stores keys and values of its own: True unless it reads those of an earlier layer."""
        return self._sources[layer] == layer

    def _blocks_and_offsets(self, slots_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return each cache slot's block number, and its offset in the block."""
        return slots_S // self.block_size, slots_S % self.block_size

    def slots_of(self, blocks: Tensor) -> Tensor:
        """Return the numbers of all slots in these blocks, in order: shape (..., N) becomes (..., N * block_size)."""
        offsets = torch.arange(self.block_size, device=blocks.device)
        return (blocks[..., None] * self.block_size + offsets).flatten(-2)

    def gather(self, layer: int, slots_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of one layer's keys and values in these cache slots: (slots, KV heads, D), in `dtype`."""
        k_SKD, v_SKD = (pools[layer].flatten(0, 1).index_select(0, slots_S) for pools in (self.keys, self.values))
        if self.cache_dtype is torch.int8:
            places = self._blocks_and_offsets(slots_S)
            k_SKD = k_SKD * self.key_scales[layer][places][..., None]
            v_SKD = v_SKD * self.value_scales[layer][places][..., None]
        return k_SKD.to(self.dtype), v_SKD.to(self.dtype)
