"""Who owns which KV block. Pure Python bookkeeping; the tensors are `model.kv_cache`'s.

A block is free (reference count 0) or owned by as many sequences as its count says. A block that was filled can be
found by the hash of all tokens up to its end, and stays findable while free, until it is handed out again: that is the
prefix cache, and the free list, oldest first, is its eviction order. Two blocks with equal content are not merged,
because block tables only ever grow at their end.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


def root_hash(salt: str, namespace: str = "") -> bytes:
    """Return the parent hash of a sequence's first block: 16 bytes, or none without a salt and a namespace.

    BLAKE2b's personalization keeps it apart from `block_hash`: no salt has the hash of another prompt's tokens. A
    namespace holds no NUL, which ends it here: no salt has the hash of another namespace.
    """
    if not salt and not namespace:
        return b""
    return hashlib.blake2b(f"{namespace}\0{salt}".encode(), digest_size=16, person=b"cache salt").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """16 bytes that stand for a full block and everything before it: BLAKE2b of the parent's hash and the ids.

    Cryptographic, because whoever could make two prefixes collide would be answered from another's context.
    """
    return hashlib.blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """`num_blocks` blocks, named 0 to num_blocks - 1.

    Raises:
        ValueError: the pool would be empty.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be positive, not {num_blocks}")
        self.num_blocks = num_blocks
        self._reference_counts = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(num_blocks))  # first out at the front
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody owns, findable ones included."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, each owned once, least recently freed first; None if there are not as many.

        What their former owners left in them is no longer found.
        """
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            assert self._reference_counts[block] == 0
            self._reference_counts[block] = 1
        self.discard(blocks)
        return blocks

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known run of these chained hashes, from the first on. Owns nothing yet."""
        blocks = []
        for wanted in hashes:
            block = self._block_of_hash.get(wanted)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free: acquiring them takes as many from what can be allocated."""
        return sum(self._reference_counts[block] == 0 for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Own these blocks once more."""
        for block in blocks:
            if self._reference_counts[block] == 0:
                del self._free[block]
            self._reference_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Own a sequence's blocks once less.

        Later blocks become evictable before earlier ones: a prefix is of use without its end, not without its head.
        What cannot be found is evicted before all that can.
        """
        for block in reversed(blocks):
            assert self._reference_counts[block] > 0, f"block {block} is freed twice"
            self._reference_counts[block] -= 1
            if self._reference_counts[block] == 0:
                self._free[block] = None
                if block not in self._hash_of_block:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, content: bytes) -> None:
        """Make a full block findable by its hash, unless an equal one is already."""
        assert self._reference_counts[block] > 0, f"block {block} is registered without an owner"
        if content not in self._block_of_hash and block not in self._hash_of_block:
            self._block_of_hash[content] = block
            self._hash_of_block[block] = content

    def forget(self) -> None:
        """Find nothing any more: what the blocks hold is in doubt."""
        self._block_of_hash.clear()
        self._hash_of_block.clear()

    def discard(self, blocks: Iterable[int]) -> None:
        """No longer find these blocks by a hash; their owners keep them."""
        for block in blocks:
            known = self._hash_of_block.pop(block, None)
            if known is not None:
                del self._block_of_hash[known]

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Every block is owned by exactly the given block tables, or free, and the two hash maps mirror each other.

        Raises:
            AssertionError: a block leaked, is owned twice in one table, or is found under a wrong hash.
        """
        owners = Counter[int]()
        for table in tables:
            assert len(set(table)) == len(table), f"a block stands twice in the table {table}"
            owners.update(table)
        for block, count in enumerate(self._reference_counts):
            assert count == owners[block], f"block {block}: {count} references, {owners[block]} owners"
            assert (count == 0) == (block in self._free), f"block {block}: {count} references, free list disagrees"
        assert len(self._free) + len(owners) == self.num_blocks
        mirrored = {content: block for block, content in self._hash_of_block.items()}
        assert mirrored == self._block_of_hash, "the hash maps disagree"
