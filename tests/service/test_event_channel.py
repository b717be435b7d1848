"""Messages arrive whole and in order, however long they are and whoever dies while writing one."""

import asyncio
import multiprocessing
import os
import signal
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from service import event_channel
from service.event_channel import EventChannel

LONG = os.urandom(3_000_000)


def _send(channel: EventChannel, items: list[Any]) -> None:
    for item in items:
        channel.send(item, 0)


def _die_half_way(channel: EventChannel) -> None:
    channel.send("whole", 0)
    channel._writer.send(bytes((event_channel._BEGINS,)) + LONG[: event_channel._PACKET_BYTES])
    os.kill(os.getpid(), signal.SIGKILL)


def _started(target: Any, *args: Any) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args)
    process.start()
    return process


async def _received(channel: EventChannel, count: int) -> list[Any]:
    return [await channel.areceive(0) for _ in range(count)]


def test_another_process_sends_messages_of_any_length_in_order() -> None:
    items = [("bus", (b"x", "OK")), LONG, b"", b"y" * event_channel._PACKET_BYTES, list(range(1000))] * 3
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
    successor = _started(_send, channel, ["hello", LONG])
    assert asyncio.run(_received(channel, 3)) == ["whole", "hello", LONG]
    successor.join()
    channel.close()


def test_a_reader_that_takes_its_time_loses_nothing() -> None:
    channel = EventChannel()
    items = [os.urandom(100_000) for _ in range(50)]
    worker = _started(_send, channel, items)

    async def slowly() -> list[Any]:
        received = []
        for _ in items:
            received.append(await channel.areceive(0))
            await asyncio.sleep(0)
        return received

    assert asyncio.run(slowly()) == items
    worker.join()
    channel.close()


def test_a_closed_channel_sends_nothing() -> None:
    channel = EventChannel()
    channel.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        channel.send("late", 0)
