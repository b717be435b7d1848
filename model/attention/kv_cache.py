"""KV-cache storage: a pool of fixed-size blocks, as in PagedAttention (Kwon et al. 2023, arXiv 2309.06180).

Legend: L layers, N blocks, P slots per block, K key/value heads, D head dimension, T packed tokens, B sequences,
S = blocks per sequence * P.
"""

import torch
from torch import Tensor

from model.config import ModelConfig
from model.system import memory_pages


def rounded(x: Tensor, cache_dtype: torch.dtype) -> Tensor:
    """Convert keys or values to the dtype of a KV-cache: round to nearest, ties to even; NaN stays NaN."""
    # For float16, numbers beyond 65,504 become 65,504: an infinite key would turn the output into NaN.
    if cache_dtype is torch.float16 and x.dtype is not cache_dtype:
        most = torch.finfo(cache_dtype).max
        x = x.clamp(-most, most)
    return x.to(cache_dtype)


class KVCache:
    """Keys and values of up to `num_blocks * block_size` tokens in all layers of a model.

    Average attention (equal weights, no keys) stores values only: its keys have the dimension D = 0.

    dtype: dtype of the tensors that `write` gets and `gather` returns: the model's.
    cache_dtype: dtype in which keys and values are kept in memory; None: `dtype`.
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
        shape_LNPK = (config.num_layers, num_blocks, block_size, config.num_kv_heads)
        # Zeros, not empty: padding reads unwritten slots, and 0 * NaN is NaN.
        self.keys_LNPKD, self.values_LNPKD = (
            memory_pages.zeros((*shape_LNPK, dim), cache_dtype or dtype)
            if torch.device(device).type == "cpu"
            else torch.zeros((*shape_LNPK, dim), dtype=cache_dtype or dtype, device=device)
            for dim in (config.key_dim, config.head_dim)
        )
        self.dtype = dtype
        self.cache_dtype = cache_dtype or dtype
        self.num_blocks = num_blocks
        self.block_size = block_size

    @property
    def num_bytes(self) -> int:
        """Return the size of the KV-cache in bytes."""
        return self.keys_LNPKD.nbytes + self.values_LNPKD.nbytes

    def write(self, layer: int, slot_mapping_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Write each token's key and value in one layer to the token's cache slot (block * block_size + offset)."""
        for pool_LNPKD, new_TKD in ((self.keys_LNPKD, k_TKD), (self.values_LNPKD, v_TKD)):
            pool_LNPKD[layer].flatten(0, 1).index_copy_(0, slot_mapping_T, rounded(new_TKD, self.cache_dtype))

    def slots_of(self, blocks: Tensor) -> Tensor:
        """Return the numbers of all slots in these blocks, in order: shape (..., N) becomes (..., N * block_size)."""
        offsets = torch.arange(self.block_size, device=blocks.device)
        return (blocks[..., None] * self.block_size + offsets).flatten(-2)

    def gather(self, layer: int, slots_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of one layer's keys and values in these cache slots: two tensors (slots, KV heads, D)."""
        k_SKD, v_SKD = (
            pool_LNPKD[layer].flatten(0, 1).index_select(0, slots_S).to(self.dtype)
            for pool_LNPKD in (self.keys_LNPKD, self.values_LNPKD)
        )
        return k_SKD, v_SKD
