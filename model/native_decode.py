"""A step of decodes that has been made ready for the kernels, to be computed again as it moves on.

After a pass of a model the processor's caches hold its weights and little else, so that each operation of Python, NumPy
and PyTorch takes ten times what it does in a loop. Here nothing is left of them but a call.

Legend: T packed tokens, B sequences, V vocabulary.
"""

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.attention.metadata import AttentionMetadata
from model.kernels.structures import Decode, Rows
from model.kv_cache import KVCache


class Decoded(NamedTuple):
    """What a step gave: each row's most likely id, the first of equals, and its logits BV float32.

    The id is -1 where a logit, or a number of the hidden state before it, is NaN or infinite.
    """

    ids: list[int]
    logits_BV: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCall:
    """What kernels are handed, and all that it points to."""

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
        """What the kernel takes."""
        return ctypes.byref(self.decode)

    def is_of(self, token_ids_T: Tensor, metadata: AttentionMetadata, kv_cache: KVCache, num_ids: int) -> bool:
        """Whether a step is in the same tensors, which may have moved on."""
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
        """What it gave when it was computed last."""
        return Decoded(self.ids[:], self.logits_BV)
