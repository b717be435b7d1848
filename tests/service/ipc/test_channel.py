"""Messages arrive whole and in order, however long they are and whoever dies while writing one."""

import asyncio
import multiprocessing
import os
import signal
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from service.ipc.channel import _BEGINS, _PACKET_BYTES, EventChannel

LONG = os.urandom(3_000_000)


def _send(channel: EventChannel, items: list[bytes]) -> None:
    for item in items:
        channel.send(item, 0)


def _die_half_way(channel: EventChannel) -> None:
    channel.send(b"whole", 0)
    channel._writer.send(bytes((_BEGINS,)) + LONG[:_PACKET_BYTES])
    os.kill(os.getpid(), signal.SIGKILL)


def _started(target: Any, *args: Any) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    return process


async def _received(channel: EventChannel, count: int) -> list[bytes]:
    received: list[bytes] = []
    are_all_here = asyncio.Event()

    def receive(message: bytes) -> None:
        received.append(message)
        if len(received) == count:
            are_all_here.set()

    channel.deliver_to(receive)
    await are_all_here.wait()
    return received


def test_another_process_sends_messages_of_any_length_in_order() -> None:
    items = [b"x", LONG, b"", b"y" * _PACKET_BYTES, b"z" * 1000] * 3
    channel = EventChannel()
    worker = _started(_send, channel, items)
    assert asyncio.run(_received(channel, len(items))) == items
    worker.join()
    channel.close()


def test_what_a_worker_had_not_written_whole_is_lost_and_nothing_else() -> None:
    channel = EventChannel()
    dying = _started(_die_half_way, channel)
    dying.join()
    assert dying.exitcode == -signal.SIGKILL
    successor = _started(_send, channel, [b"hello", LONG])
    assert asyncio.run(_received(channel, 3)) == [b"whole", b"hello", LONG]
    successor.join()
    channel.close()


def test_a_message_is_handed_over_in_the_turn_in_which_it_is_read() -> None:
    """And the next one in a turn of its own, so that clients are looked at between two."""

    async def test() -> None:
        channel, turns = EventChannel(), list[int]()
        number = 0
        is_over = asyncio.Event()

        def receive(message: bytes) -> None:
            turns.append(number)
            if message == b"last":
                is_over.set()

        for message in (b"first", LONG[:100_000], b"last"):
            channel.send(message, 0)
        channel.deliver_to(receive)
        assert not turns
        while not is_over.is_set():
            await asyncio.sleep(0)
            number += 1
        assert len(set(turns)) == 3
        channel.close()

    asyncio.run(test())


def test_a_closed_channel_sends_nothing() -> None:
    channel = EventChannel()
    channel.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        channel.send(b"late", 0)
