"""Messages of any length arrive whole and in order, even if a process dies while writing."""

import asyncio
import errno
import multiprocessing
import os
import signal
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from service.ipc.channel import _BEGINS, _PACKET_BYTES, Channel, WorkerChannel

LONG = os.urandom(3_000_000)


def _send(channel: WorkerChannel, items: list[bytes]) -> None:
    for item in items:
        channel.send(item)


def _die_half_way(channel: WorkerChannel) -> None:
    channel.send(b"whole")
    channel._socket.send(bytes((_BEGINS,)) + LONG[:_PACKET_BYTES])
    os.kill(os.getpid(), signal.SIGKILL)


def _started(target: Any, channel: Channel, *args: Any) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(
        target=target, args=(WorkerChannel(channel.worker_end), *args)
    )
    process.start()
    return process


async def _received(channel: Channel, count: int) -> list[bytes]:
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
    channel = Channel()
    worker = _started(_send, channel, items)
    assert asyncio.run(_received(channel, len(items))) == items
    worker.join()
    channel.close()


def test_only_the_unfinished_message_of_a_dead_worker_is_lost() -> None:
    channel = Channel()
    dying = _started(_die_half_way, channel)
    dying.join()
    assert dying.exitcode == -signal.SIGKILL
    successor = _started(_send, channel, [b"hello", LONG])
    assert asyncio.run(_received(channel, 3)) == [b"whole", b"hello", LONG]
    successor.join()
    channel.close()


def test_a_message_is_delivered_in_the_event_loop_iteration_that_reads_the_message() -> None:
    """The next message is delivered in another iteration, so that clients are served between two messages."""

    async def test() -> None:
        channel, turns = Channel(), list[int]()
        number = 0
        is_over = asyncio.Event()

        def receive(message: bytes) -> None:
            turns.append(number)
            if message == b"last":
                is_over.set()

        for message in (b"first", LONG[:100_000], b"last"):
            WorkerChannel(channel.worker_end).send(message)
        channel.deliver_to(receive)
        assert not turns
        while not is_over.is_set():
            await asyncio.sleep(0)
            number += 1
        assert len(set(turns)) == 3
        channel.close()

    asyncio.run(test())


def test_a_closed_channel_sends_nothing() -> None:
    channel = Channel()
    worker = WorkerChannel(channel.worker_end)
    channel.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        worker.send(b"late")


def _receive(channel: WorkerChannel, count: int) -> list[bytes]:
    received: list[bytes] = []
    while len(received) < count:
        if (message := channel.receive(60.0)) is not None:
            received.append(message)
    return received


def _echo(channel: WorkerChannel, count: int) -> None:
    for message in _receive(channel, count):
        channel.send(message)


def test_commands_of_any_length_reach_another_process_in_order() -> None:
    """The messages are longer than the socket's buffer, so some packets are queued in the sending process."""
    items = [b"x", LONG, b"", b"y" * _PACKET_BYTES, b"z" * 1000] * 3
    channel = Channel()

    async def test() -> list[bytes]:
        for item in items:
            channel.submit(item)
        assert channel._unsent
        worker = _started(_echo, channel, len(items))
        received = await _received(channel, len(items))
        worker.join()
        return received

    assert asyncio.run(test()) == items
    assert not channel._unsent
    channel.close()


def test_receive_returns_none_before_a_message_is_sent() -> None:
    channel = Channel()
    worker = WorkerChannel(channel.worker_end)
    assert worker.receive(0.0) is None
    assert worker.receive(0.01) is None
    channel.submit(b"now")
    assert worker.receive(0.0) == b"now"
    channel.close()


def test_a_new_worker_gets_whole_messages_after_unsent_packets_were_dropped() -> None:
    async def test() -> None:
        channel = Channel()
        worker = WorkerChannel(channel.worker_end)
        for _ in range(10):
            channel.submit(LONG)  # the worker dies before it has read all, and the rest was never sent
        assert channel._unsent
        channel.discard_unsent()
        channel.submit(b"for the new worker")
        received: list[bytes] = []
        while received[-1:] != [b"for the new worker"]:
            if (message := worker.receive(0.0)) is not None:
                received.append(message)
            await asyncio.sleep(0)  # the event loop sees that the socket has room again
        assert set(received[:-1]) <= {LONG}
        channel.close()

    asyncio.run(test())


def test_a_packet_is_sent_again_if_the_kernel_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`submit` raises no error, and the packet is sent later."""

    class Failing:
        def __init__(self, writer: Any) -> None:
            self.writer, self.num_calls = writer, 0

        def fileno(self) -> int:
            return int(self.writer.fileno())

        def sendmsg(self, packet: Any, *given: Any) -> None:
            self.num_calls += 1
            if self.num_calls < 4:
                raise OSError(errno.ENOBUFS, "No buffer space available")
            self.writer.sendmsg(packet, *given)

    async def test() -> None:
        channel = Channel()
        failing: Any = Failing(channel._socket)
        channel._socket = failing
        worker = WorkerChannel(channel.worker_end)
        channel.submit(b"first")
        channel.submit(b"second")
        while channel._unsent:
            await asyncio.sleep(0.001)
        assert [worker.receive(0.0), worker.receive(0.0)] == [b"first", b"second"]
        assert failing.num_calls == 5
        channel._socket = failing.writer
        channel.close()

    monkeypatch.setattr("service.ipc.channel._RETRY_SECONDS", 0.001)
    asyncio.run(test())
