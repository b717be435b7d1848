"""KV-block allocator with reference counts and a prefix cache. The tensors are in `model.attention.kv_cache`.

A free block has reference count 0. The prefix cache finds a free block by the hash of its content until the block is
allocated again; the least recently freed block is allocated first. Blocks with equal content are not merged, because
block tables are append-only.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from service.engine.scheduling.cache_events import CacheLog


def root_hash(salt: str, namespace: str = "", adapter: str = "") -> bytes:
    """Return the parent hash of a sequence's first block: 16 bytes, or empty without salt, namespace and adapter.

    No salt that a client chooses can produce the hash of a block, or the root hash of a different namespace or adapter.
    BLAKE2b's personalization separates root hashes from block hashes. Adapter and namespace end at a NUL, which neither
    contains.
    """
    if not salt and not namespace and not adapter:
        return b""
    return hashlib.blake2b(f"{adapter}\0{namespace}\0{salt}".encode(), digest_size=16, person=b"cache salt").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the 16-byte hash of a full KV block, computed from the preceding block's hash (`parent`) and token ids."""
    # Cryptographic: a client that can make two prefixes collide could read another client's context.
    return hashlib.blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Pool of the KV blocks 0 to num_blocks - 1, with the prefix cache.

    log: gets the hashes of the blocks that leave the prefix cache; None: there is no log.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.log: CacheLog | None = None
        self._reference_counts = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))  # the next block to allocate comes first
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Number of KV blocks that no sequence uses, cached blocks included."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate KV blocks and remove them from the prefix cache; return None if too few blocks are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            assert self._reference_counts[block] == 0
            self._reference_counts[block] = 1
        self.discard(blocks)
        return blocks

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of a sequence's longest cached prefix, given the chained hashes of its first blocks."""
        blocks = []
        for content in hashes:
            block = self._block_of_hash.get(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of the given KV blocks no sequence uses."""
        return sum(self._reference_counts[block] == 0 for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._reference_counts[block] == 0:
                del self._free[block]
            self._reference_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Decrement the reference counts of a sequence's blocks. Blocks that reach 0 are free, but may stay cached.

        Of all free blocks, uncached ones are allocated first. Of this sequence's cached blocks, its last comes first.
        """
        for block in reversed(blocks):  # a prefix is useless without its beginning
            assert self._reference_counts[block] > 0, f"block {block} is freed twice"
            self._reference_counts[block] -= 1
            if self._reference_counts[block] == 0:
                self._free[block] = None
                if block not in self._hash_of_block:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, content: bytes) -> bool:
        """Add a full KV block to the prefix cache. Return False if the block, or one with the same hash, is in it."""
        assert self._reference_counts[block] > 0, f"block {block} is registered with reference count 0"
        if content in self._block_of_hash or block in self._hash_of_block:
            return False
        self._block_of_hash[content] = block
        self._hash_of_block[block] = content
        return True

    def forget(self) -> None:
        """Clear the prefix cache, because the content of the KV blocks may be invalid. Reference counts stay."""
        self._block_of_hash.clear()
        self._hash_of_block.clear()
        if self.log is not None:
            self.log.clear()

    def discard(self, blocks: Iterable[int]) -> None:
        """Remove these KV blocks from the prefix cache. Reference counts stay unchanged."""
        removed = [known for block in blocks if (known := self._hash_of_block.pop(block, None)) is not None]
        for known in removed:
            del self._block_of_hash[known]
        if removed and self.log is not None:
            self.log.remove(removed)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that reference counts match the block tables of all sequences, and that the two hash maps agree."""
        users = Counter[int]()
        for table in tables:
            assert len(set(table)) == len(table), f"a block occurs twice in the table {table}"
            users.update(table)
        for block, count in enumerate(self._reference_counts):
            assert count == users[block], f"block {block}: reference count {count}, but in {users[block]} tables"
            assert (count == 0) == (block in self._free), (
                f"block {block}: reference count {count} contradicts the free list"
            )
        assert len(self._free) + len(users) == self.num_blocks
        mirrored = {content: block for block, content in self._hash_of_block.items()}
        assert mirrored == self._block_of_hash, "the hash maps differ"
