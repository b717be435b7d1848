"""KV-cache storage: a pool of fixed-size blocks, as in PagedAttention (Kwon et al. 2023, arXiv 2309.06180).

Legend: L layers, N blocks, P slots per block, K key/value heads, D head dimension, T packed tokens, B sequences,
S = blocks per sequence * P.
"""

import torch
from torch import Tensor

from model.config import ModelConfig
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

    The result has the dtype of the cache. For int8 it has the dtype of x, see `quantized`.
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

    Average attention (equal weights, no keys) stores values only: its keys have the dimension D = 0.

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

        pools, heads = (config.num_layers, num_blocks), config.num_kv_heads
        self.keys_LNPKD = zeros(*pools, block_size, heads, config.key_dim)
        self.values_LNPKD = zeros(*pools, block_size, heads, config.head_dim)
        # A head's scales of a block are contiguous in memory, because kernels read many tokens of a head.
        num_scales = block_size if self.cache_dtype is torch.int8 else 0
        self.key_scales_LNPK, self.value_scales_LNPK = (
            zeros(*pools, heads, num_scales, dtype=torch.float32).transpose(2, 3) for _ in range(2)
        )
        self.num_blocks = num_blocks
        self.block_size = block_size

    @property
    def num_bytes(self) -> int:
        """Return the size of the KV-cache in bytes."""
        scales = self.key_scales_LNPK, self.value_scales_LNPK
        return sum(tensor.nbytes for tensor in (self.keys_LNPKD, self.values_LNPKD, *scales))

    def write(self, layer: int, slot_mapping_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Write each token's key and value in one layer to the token's cache slot (block * block_size + offset).

        They are rounded to the cache's dtype, as by `rounded`.
        """
        keys, values = (self.keys_LNPKD, self.key_scales_LNPK), (self.values_LNPKD, self.value_scales_LNPK)
        for (pool_LNPKD, scales_LNPK), new_TKD in ((keys, k_TKD), (values, v_TKD)):
            if self.cache_dtype is torch.int8:
                new_TKD, scales_LNPK[layer][self._places(slot_mapping_T)] = quantized(new_TKD)
            else:
                new_TKD = rounded(new_TKD, self.cache_dtype)
            pool_LNPKD[layer].flatten(0, 1).index_copy_(0, slot_mapping_T, new_TKD)

    def _places(self, slots_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return block and offset of each cache slot."""
        return slots_S // self.block_size, slots_S % self.block_size

    def slots_of(self, blocks: Tensor) -> Tensor:
        """Return the numbers of all slots in these blocks, in order: shape (..., N) becomes (..., N * block_size)."""
        offsets = torch.arange(self.block_size, device=blocks.device)
        return (blocks[..., None] * self.block_size + offsets).flatten(-2)

    def gather(self, layer: int, slots_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of one layer's keys and values in these cache slots: (slots, KV heads, D), in `dtype`."""
        k_SKD, v_SKD = (
            pool_LNPKD[layer].flatten(0, 1).index_select(0, slots_S)
            for pool_LNPKD in (self.keys_LNPKD, self.values_LNPKD)
        )
        if self.cache_dtype is torch.int8:
            places = self._places(slots_S)
            k_SKD = k_SKD * self.key_scales_LNPK[layer][places][..., None]
            v_SKD = v_SKD * self.value_scales_LNPK[layer][places][..., None]
        return k_SKD.to(self.dtype), v_SKD.to(self.dtype)
