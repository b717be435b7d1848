"""Choice of workers by load and cached prefix, and requests that stay with their worker."""

from collections.abc import Sequence
from functools import partial

import msgspec
import pytest

from service.ipc.messages import Command, LoadAdapter, Submit
from service.requests.adapters import ServedAdapter
from tests.service.desk import Desk, FakeWorker
from tests.service.sequences import make_choice, make_delta, make_finish, make_hello, make_request, make_submit

BLOCK = 4
LONG = tuple(range(20))  # five blocks, which are worth 160 tokens of load


class Pair:
    """Two ready workers, their dispatcher, and an engine client over both, which records the commands."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Command]] = []
        self.workers = [FakeWorker(partial(self._take, index), index) for index in (0, 1)]
        self.client = Desk(workers=self.workers, block_size=BLOCK).engine_client
        for index in (0, 1):
            self.client.receive([make_hello(0)], index)

    def _take(self, index: int, commands: Sequence[Command]) -> None:
        self.sent += [(index, command) for command in commands]

    def choose(self, prompt: tuple[int, ...] = (), **fields: str) -> int:
        return self.client.dispatcher.choose(msgspec.structs.replace(make_submit(prompt=prompt), **fields)).index

    def submitted(self) -> list[tuple[int, str]]:
        return [(index, command.uid) for index, command in self.sent if isinstance(command, Submit)]


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_equal_workers_get_requests_in_turn(pair: Pair) -> None:
    assert [pair.choose() for _ in range(4)] == [0, 1, 0, 1]


def test_a_request_goes_to_the_worker_with_fewer_unfinished_tokens(pair: Pair) -> None:
    pair.workers[0].num_tokens = 1
    assert [pair.choose() for _ in range(3)] == [1, 1, 1]


def test_a_prefix_goes_to_its_worker_until_that_worker_has_too_much_more_to_do(pair: Pair) -> None:
    home = pair.choose(LONG)
    assert [pair.choose((*LONG, 99)) for _ in range(3)] == [home] * 3
    pair.workers[home].num_tokens = 8 * len(LONG) - 1
    assert pair.choose((*LONG, 99)) == home
    pair.workers[home].num_tokens += 2
    assert pair.choose((*LONG, 99)) != home
    assert pair.choose((*LONG, 99)) != home, "now both hold it, and the load decides"


def test_the_longest_prefix_decides(pair: Pair) -> None:
    first = pair.choose(LONG)
    second = pair.choose((1, 1, *LONG))
    assert first != second
    assert pair.choose(LONG[:8]) == first
    assert pair.choose((1, 1, *LONG[:8])) == second
    pair.workers[first].num_tokens = 10
    assert pair.choose((*LONG[:4], *range(50, 60))) == first, "one block is worth 32 tokens"


def test_a_prefix_belongs_to_its_salt_namespace_and_adapter(pair: Pair) -> None:
    for field in ("cache_salt", "cache_namespace", "adapter"):
        homes = {pair.choose(LONG, **{field: value}) for value in "ab"}
        assert homes == {0, 1}, "the second finds nothing, and takes its turn"


def test_workers_that_restart_or_hang_come_last(pair: Pair) -> None:
    home = pair.choose(LONG)
    pair.workers[home].state.epoch.value = 1
    assert [pair.choose(LONG) for _ in range(2)] == [1 - home] * 2
    pair.workers[1 - home].is_stalled = True
    assert pair.choose((7,)) == home, "its replacement gets the request"


def test_a_new_process_holds_no_prefix(pair: Pair) -> None:
    home = pair.choose(LONG)
    pair.workers[home].state.epoch.value = 1
    pair.client.receive([make_hello(1)], home)
    pair.workers[home].num_tokens = 1
    assert pair.choose(LONG) != home


def test_only_as_many_blocks_are_known_as_a_worker_can_hold(pair: Pair) -> None:
    """Each worker's KV-cache has 8 blocks. Of an earlier prompt, the last blocks are forgotten first."""
    first = pair.choose(LONG)
    pair.workers[1 - first].num_tokens = 1
    assert pair.choose(tuple(range(100, 128))) == first
    pair.workers[1 - first].num_tokens, pair.workers[first].num_tokens = 0, 31
    assert pair.choose(LONG[:4]) == first, "its first block is known, and worth 32 tokens"
    pair.workers[first].num_tokens = 33
    assert pair.choose(LONG) != first


def test_a_request_stays_with_its_worker_and_only_the_dead_workers_requests_are_sent_again(pair: Pair) -> None:
    requests = [make_request(make_choice(uid)) for uid in "abcd"]
    for request in requests:
        pair.client.submit(request)
    assert pair.submitted() == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]
    assert [worker.num_tokens for worker in pair.workers] == [26, 26]
    pair.client.receive([make_delta("b", ids=(5,))], 1)
    pair.client.receive([make_hello(1)], 1)
    assert pair.submitted()[4:] == [(1, "b"), (1, "d")]
    pair.client.receive([make_delta("a", ids=(5,), finish=make_finish())], 0)
    pair.client.finish(requests[1])
    assert [worker.num_tokens for worker in pair.workers] == [13, 13]


def test_adapters_are_loaded_by_all_workers_and_by_their_replacements(pair: Pair) -> None:
    pair.sent.clear()
    pair.client.load_adapter(ServedAdapter(name="a", directory="/a", key="k", created_seconds=0, num_bytes=1))
    pair.client.receive([make_hello(1)], 1)
    load = LoadAdapter(key="k", directory="/a")
    assert pair.sent == [(0, load), (1, load), (1, load)]
