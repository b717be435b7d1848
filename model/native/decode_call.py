"""Prepared decode step of the native kernels, reused from step to step while its tensors are updated in place.

After a model's pass the CPU caches hold mostly its weights. Each Python, NumPy or PyTorch operation then takes ten
times as long as in a loop. A prepared step leaves a single call.

Legend: T packed tokens, B sequences, V vocabulary.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.attention.kv_cache import KVCache
from model.attention.metadata import AttentionMetadata
from model.kernels.ctypes_structs import Decode, Rows


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
