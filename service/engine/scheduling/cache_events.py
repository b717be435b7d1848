"""Changes of the prefix cache, as events that routers read to find the replica with the longest cached prefix.

Names and fields are those of vLLM's KV-cache events (vllm/distributed/kv_events.py), in its array form.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

_MEDIUM = "GPU"  # where the engine's own cache is; vLLM writes this on a CPU, too


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Event: adjacent blocks of one sequence have entered the prefix cache.

    parent_block_hash: hash of the block before the first one; None: the first block begins the sequence.
    token_ids: the tokens of all these blocks.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str = _MEDIUM
    lora_name: None = None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Event: blocks have left the prefix cache."""

    block_hashes: list[int]
    medium: str = _MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Event: the prefix cache has been cleared."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class CacheLog:
    """Log of the changes of a prefix cache since the last `take`."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def store(self, hashes: Sequence[bytes], parent: bytes | None, token_ids: Sequence[int]) -> None:
        """Record that adjacent blocks of a sequence, with these hashes and tokens, entered the prefix cache."""
        self._events.append(
            BlockStored(
                [external_hash(content) for content in hashes],
                None if parent is None else external_hash(parent),
                list(token_ids),
                len(token_ids) // len(hashes),
            )
        )

    def remove(self, hashes: Sequence[bytes]) -> None:
        """Record that blocks with these hashes were removed from the prefix cache."""
        self._events.append(BlockRemoved([external_hash(content) for content in hashes]))

    def clear(self) -> None:
        """Record that the prefix cache was cleared, which makes all earlier changes irrelevant."""
        self._events = [AllBlocksCleared()]

    def take(self) -> list[CacheEvent]:
        """Return the changes of the prefix cache since the last call, in order."""
        events, self._events = self._events, []
        return events


def external_hash(content: bytes) -> int:
    """Return the first 64 bits of a block's hash: the form that vLLM publishes by default."""
    return int.from_bytes(content[:8], "big")
