"""Stateful test of the block pool: no leaks, no block with two owners, least recently freed blocks evicted first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.engine.scheduling.block_pool import BlockPool, block_hash, root_hash

NUM_BLOCKS = 7


class PoolMachine(RuleBasedStateMachine):
    """Hypothesis state machine of a block pool: block tables are created and freed, and share equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.contents: dict[int, bytes] = {}  # last content of each block

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        blocks = self.pool.allocate(count)
        if count > free:
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        assert not set(blocks) & {block for table in self.tables for block in table}
        for block in blocks:
            self.contents.pop(block, None)
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), content=st.binary(min_size=1, max_size=1))
    def fill(self, data: st.DataObject, content: bytes) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        block = data.draw(st.sampled_from(table))
        self.pool.register(block, content)
        if content not in self.contents.values():
            self.contents.setdefault(block, content)

    @rule(contents=st.lists(st.binary(min_size=1, max_size=1), unique=True, max_size=3))
    def share(self, contents: list[bytes]) -> None:
        blocks = self.pool.find(contents)
        assert [self.contents[block] for block in blocks] == contents[: len(blocks)]
        if len(blocks) < len(contents):
            assert contents[len(blocks)] not in self.contents.values()
        free, among = self.pool.num_free, self.pool.num_free_among(blocks)
        self.pool.acquire(blocks)
        assert self.pool.num_free == free - among
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)

    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity(self.tables)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_the_least_recently_freed_block_is_evicted_first_and_a_tail_before_its_head() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None
    assert second is not None
    for block, name in zip([*first, *second], [b"a", b"b", b"c", b"d"], strict=True):
        pool.register(block, name)
    pool.free(second)
    pool.free(first)
    assert pool.find([b"a", b"b"]) == first
    pool.allocate(1)
    assert (len(pool.find([b"c"])), len(pool.find([b"d"]))) == (1, 0)
    pool.allocate(1)
    assert (len(pool.find([b"c"])), len(pool.find([b"a", b"b"]))) == (0, 2)
    pool.allocate(1)
    assert pool.find([b"a", b"b"]) == first[:1]


def test_blocks_without_a_hash_are_evicted_first() -> None:
    pool = BlockPool(4)
    found, unfinished = pool.allocate(2), pool.allocate(1)
    assert found is not None
    assert unfinished is not None
    pool.register(found[0], b"a")
    pool.register(found[1], b"b")
    pool.free(found)
    pool.free(unfinished)
    assert pool.allocate(1) == unfinished
    pool.allocate(1)
    assert pool.find([b"a", b"b"]) == found


def test_a_cleared_prefix_cache_finds_no_blocks() -> None:
    pool = BlockPool(2)
    owned, freed = pool.allocate(1), pool.allocate(1)
    assert owned is not None
    assert freed is not None
    pool.register(owned[0], b"a")
    pool.register(freed[0], b"b")
    pool.free(freed)
    pool.forget()
    assert pool.find([b"a"]) == pool.find([b"b"]) == []
    pool.check_integrity([owned])
    pool.register(owned[0], b"b")
    assert pool.find([b"b"]) == owned


def test_a_freed_block_that_is_shared_again_is_not_evicted() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.register(blocks[0], b"a")
    pool.free(blocks)
    pool.acquire(pool.find([b"a"]))
    assert pool.allocate(2) is None
    assert pool.find([b"a"]) == blocks


def test_block_hashes_depend_on_all_earlier_tokens() -> None:
    assert block_hash(b"", [1, 2]) != block_hash(b"", [2, 1])
    assert block_hash(block_hash(b"", [1, 2]), [3]) != block_hash(block_hash(b"", [9, 2]), [3])
    assert len(block_hash(b"", [1])) == 16


def test_integrity_check_finds_leaks_and_double_owners() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    assert blocks is not None
    for wrong in ([], [blocks, blocks], [[blocks[0]]], [[blocks[0], blocks[0]]]):
        with pytest.raises(AssertionError):
            pool.check_integrity(wrong)
    pool.check_integrity([blocks])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([blocks[0], blocks[0]])


def test_no_salt_collides_with_token_ids() -> None:
    """A salt equal to the bytes of another request's first block must not give access to its cached context."""
    first = block_hash(b"", [97, 98])
    assert root_hash("a\0\0\0b\0\0\0") != first
    assert root_hash("") == b""
    assert len({root_hash("a"), root_hash("b"), root_hash("A")}) == 3


def test_no_salt_has_the_hash_of_another_namespace() -> None:
    """A client can choose any salt, even the name of another API key's namespace."""
    pairs = [
        ("", ""),
        ("", "bob"),
        ("bob", ""),
        ("x", "bob"),
        ("bobx", ""),
        ("bob\0x", ""),
        ("\0x", "bob"),
        ("x", "bo"),
    ]
    assert len({root_hash(salt, namespace) for salt, namespace in pairs}) == len(pairs)
