"""Publication of the prefix cache's changes: format, order, repetition, and a server whose worker dies."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from service.engine.scheduling.block_pool import block_hash
from service.engine.scheduling.cache_events import BlockStored, CacheLog, external_hash
from service.worker.cache_event_publisher import CacheEventPublisher, address_of
from tests.e2e.process import Service, serving, wait_until

BLOCK = 16


def free_address() -> str:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


class Router:
    """Subscriber of one worker's events, which knows the cached blocks."""

    def __init__(self, endpoint: str, topic: str = "", rank: int = 0) -> None:
        self._rank = rank
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)
        self.topics: set[str] = set()
        self.numbers: list[int] = []
        self.blocks: dict[int, list[int]] = {}  # tokens by hash

    def read(self, timeout_ms: int) -> bool:
        """Apply the next batch. Return False if none comes in time."""
        if not self._socket.poll(timeout_ms):
            return False
        topic, number, payload = self._socket.recv_multipart()
        self.topics.add(topic.decode())
        self.numbers.append(int.from_bytes(number, "big"))
        self.apply(payload)
        return True

    def apply(self, payload: bytes) -> None:
        seconds, events, rank = msgspec.msgpack.decode(payload)
        assert seconds > 1.7e9
        assert rank == self._rank
        for kind, *fields in events:
            match kind:
                case "BlockStored":
                    hashes, parent, tokens, size, lora_id, medium, lora_name = fields
                    assert (lora_id, medium, lora_name, size) == (None, "GPU", None, BLOCK)
                    assert parent is None or parent in self.blocks
                    for number, content in enumerate(hashes):
                        self.blocks[content] = tokens[number * size : (number + 1) * size]
                case "BlockRemoved":
                    hashes, medium = fields
                    assert medium == "GPU"
                    for content in hashes:
                        self.blocks.pop(content, None)
                case "AllBlocksCleared":
                    self.blocks.clear()

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def router() -> Iterator[tuple[Router, str]]:
    endpoint = free_address()
    router = Router(endpoint, "kv@")
    yield router, endpoint
    router.close()


def chain(tokens: list[int]) -> list[int]:
    """Return the published hashes of a prompt's full blocks."""
    parent, hashes = b"", []
    for first in range(0, len(tokens) - len(tokens) % BLOCK, BLOCK):
        parent = block_hash(parent, tokens[first : first + BLOCK])
        hashes.append(external_hash(parent))
    return hashes


def test_missed_batches_are_repeated_on_request(router: tuple[Router, str]) -> None:
    subscriber, endpoint = router
    replay = free_address()
    publisher = CacheEventPublisher(endpoint, replay_endpoint=replay, topic="kv@here@tiny")
    log = CacheLog()
    publisher.publish(log.take())  # nothing: no batch
    for number in range(3):
        parent = None if number == 0 else bytes([number - 1] * 16)
        log.store([bytes([number] * 16)], parent, range(BLOCK * number, BLOCK * (number + 1)))
        publisher.publish(log.take())
    request: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    request.connect(replay)
    for bad in ([b"1"], [b"", b"short"], [b"", bytes(8), b"more"]):  # ignored
        request.send_multipart(bad)
    request.send_multipart([b"", (1).to_bytes(8, "big")])
    replies: list[tuple[int, bytes]] = []
    while not replies or replies[-1][1]:
        assert request.poll(10_000)
        empty, position, payload = request.recv_multipart()
        assert empty == b""
        replies.append((int.from_bytes(position, "big", signed=True), payload))
    assert [number for number, _ in replies] == [1, 2, -1]
    request.close(linger=0)
    publisher.close()
    subscriber.blocks[external_hash(bytes(16))] = []
    for _, payload in replies[:-1]:
        subscriber.apply(payload)
    assert list(subscriber.blocks.values()) == [[], list(range(16, 32)), list(range(32, 48))]


def test_a_slow_subscriber_gets_every_missed_batch() -> None:
    replay = free_address()
    publisher = CacheEventPublisher(free_address(), replay_endpoint=replay)
    tokens = list(range(10_000))  # 2,000 such batches do not fit into the kernel's buffers
    for _ in range(2000):
        publisher.publish([BlockStored([1], None, tokens, BLOCK)])
    request: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    request.set_hwm(1)
    request.connect(replay)
    wait_until(lambda: _missed(request, 1999) == [1999, -1], what="the last batch")
    assert _missed(request, 0, pause_seconds=0.5) == [*range(2000), -1]
    request.close(linger=0)
    publisher.close()


def _missed(request: "zmq.Socket[bytes]", first: int, *, pause_seconds: float = 0.0) -> list[int]:
    """Ask for the batches from a number on. Return the numbers of the replies, read after a pause."""
    request.send_multipart([b"", first.to_bytes(8, "big")])
    time.sleep(pause_seconds)
    numbers: list[int] = []
    while not numbers or numbers[-1] >= 0:
        assert request.poll(10_000), f"no reply after {numbers[-1:]}"
        numbers.append(int.from_bytes(request.recv_multipart()[1], "big", signed=True))
    return numbers


def test_a_client_that_sends_a_large_message_is_disconnected() -> None:
    replay = free_address()
    publisher = CacheEventPublisher(free_address(), replay_endpoint=replay)
    client: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    watch = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.connect(replay)
    client.send_multipart([b"", bytes(2**16)])
    assert watch.poll(10_000)
    client.disable_monitor()
    for opened in (watch, client):
        opened.close(linger=0)
    publisher.close()


def test_each_worker_has_an_address_of_its_own() -> None:
    assert [address_of("tcp://*:5557", rank) for rank in (0, 2)] == ["tcp://*:5557", "tcp://*:5559"]
    assert [address_of("ipc:///run/events", rank) for rank in (0, 1)] == ["ipc:///run/events", "ipc:///run/events_dp1"]


@pytest.mark.parametrize("flag", ["endpoint", "replay_endpoint"])
def test_an_address_in_use_is_named(flag: str) -> None:
    taken: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
    address = free_address()
    taken.bind(address)
    addresses: dict[str, Any] = {"endpoint": free_address(), flag: address}
    with pytest.raises(
        OSError, match=f"^--kv-events-{flag.replace('_', '-')} {address}: address already in use; choose"
    ):
        CacheEventPublisher(**addresses)
    taken.close(linger=0)


@pytest.mark.slow
def test_a_router_knows_the_cache_of_a_server_whose_worker_dies(
    tiny_checkpoint: Path, tmp_path: Path, router: tuple[Router, str]
) -> None:
    subscriber, endpoint = router
    options = ("--kv-events-endpoint", endpoint, "--kv-events-topic", "kv@here@tiny", "--block-size", str(BLOCK))
    prompts = (list(range(first, first + 2 * BLOCK + 3)) for first in range(100))
    with serving(tiny_checkpoint, tmp_path, *options) as service:
        wait_until(lambda: _learns(service, subscriber, next(prompts)), what="events of a prompt")
        assert not _learns(service, subscriber, prompt := next(prompts), cache_salt="mine")
        assert _learns(service, subscriber, prompt)
        before = len(subscriber.blocks)
        service.worker.kill()
        wait_until(lambda: _learns(service, subscriber, next(prompts)), what="events of the next worker")
        assert len(subscriber.blocks) < before
        assert subscriber.topics == {"kv@here@tiny"}
        assert 0 in subscriber.numbers[1:], "the numbers of the next worker begin again"


def _learns(service: Service, subscriber: Router, prompt: list[int], **fields: str) -> bool:
    """Complete a prompt that is not cached. Return True if its full blocks are published."""
    service.complete(prompt, max_tokens=1, **fields)
    while subscriber.read(500):
        pass
    blocks = [subscriber.blocks.get(content) for content in chain(prompt)]
    return blocks == [prompt[:BLOCK], prompt[BLOCK : 2 * BLOCK]]
