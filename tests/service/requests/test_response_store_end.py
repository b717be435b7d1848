"""Responses that are not buffered or are dropped: errors, expiry, memory limits."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from service.protocol.errors import EngineFailed, ResponseGone
from service.protocol.responses import encode_event
from service.requests import response_store
from tests.service.recorded import Client, Events, Kept, gives, never, settle


def fails_after(gate: asyncio.Event) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def make() -> Response:
        await gate.wait()
        raise EngineFailed("no", retry=True)

    return make


async def is_made_anew(kept: Kept, key: str = "k") -> None:
    """Check that a request with this Idempotency-Key gets a newly generated response, not a buffered one."""
    again = Client(idempotency_key=key)
    await again.ask(kept.all, gives(Response(b"anew")))
    assert again.received == b"anew"


def test_an_error_reaches_all_readers_and_is_not_kept() -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            gate = asyncio.Event()
            asking = [
                asyncio.create_task(Client(idempotency_key="k").ask(kept.all, fails_after(gate))) for _ in range(2)
            ]
            await settle()
            gate.set()
            for result in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(result, EngineFailed)
            await is_made_anew(kept)

    asyncio.run(scenario())


def test_an_error_without_readers_is_not_kept() -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            gate = asyncio.Event()
            client = Client(idempotency_key="k")
            asking = asyncio.create_task(client.ask(kept.all, fails_after(gate)))
            await settle()
            client.left.set()
            await asking
            gate.set()
            await settle()
            await is_made_anew(kept)

    asyncio.run(scenario())


def test_a_stream_that_ends_with_an_error_is_not_repeated() -> None:
    class Broken(Events):
        async def _deliver(self, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            error = encode_event(EngineFailed("no", retry=True).body())
            await send({"type": "http.response.body", "body": error, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def scenario() -> None:
        async with Kept() as kept:
            client = Client(idempotency_key="k")
            await client.ask(kept.all, gives(Broken(0)))
            assert '"engine_failed"' in client.events[0]
            await is_made_anew(kept)

    asyncio.run(scenario())


def test_a_response_without_readers_expires() -> None:
    async def scenario() -> None:
        async with Kept(keep_seconds=0.01) as kept:
            stream, client = Events(2), Client(idempotency_key="k")
            asking = asyncio.create_task(client.ask(kept.all, gives(stream)))
            stream.let(1)
            await settle()
            await asyncio.sleep(0.02)
            kept.all.discard_expired()
            await settle()
            assert not stream.was_abandoned, "a client is still reading"
            client.left.set()
            await asking
            await asyncio.sleep(0.02)
            kept.all.discard_expired()
            await settle()
            assert stream.was_abandoned
            with pytest.raises(ResponseGone):
                await Client(last_event_id=client.ids[0]).ask(kept.all, never)
            await is_made_anew(kept)

    asyncio.run(scenario())


def test_a_response_does_not_expire_while_a_client_resumes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(response_store, "time", SimpleNamespace(monotonic=lambda: now))

    async def scenario() -> None:
        nonlocal now
        async with Kept(keep_seconds=10.0) as kept:
            stream, first = Events(2), Client(accept="text/event-stream")
            asking = asyncio.create_task(first.ask(kept.all, gives(stream)))
            stream.let(1)
            await settle()
            first.left.set()
            await asking
            now = 10.5
            second = Client(last_event_id=first.ids[0])
            response = await kept.all.answer(Request(second.scope), second.body, never)
            kept.all.discard_expired()
            await settle()
            stream.let(1)
            await response(second.scope, second.receive, second.send)
            assert not stream.was_abandoned
            assert len(second.events) == 1

    asyncio.run(scenario())


def test_buffers_are_bounded_and_a_late_reader_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_RESPONSE_BYTES", 5_000)
    monkeypatch.setattr(response_store, "MAX_KEPT_BYTES", 20_000)

    async def scenario() -> None:
        async with Kept() as kept:
            stream, client = Events(100, size=1_000), Client(idempotency_key="long")
            stream.let(100)
            await client.ask(kept.all, gives(stream))
            assert ["too slowly" in event for event in client.events] == [True], "all events arrived at once"
            with pytest.raises(ResponseGone):
                await Client(idempotency_key="long").ask(kept.all, never)
            for number in range(5):
                await Client(idempotency_key=f"k{number}").ask(kept.all, gives(Response(b"y" * 1_000)))
            kept.all.discard_expired()
            await is_made_anew(kept, "k0")
            newest = Client(idempotency_key="k4")
            await newest.ask(kept.all, never)
            assert len(newest.received) == 1_000

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "beginning"),
    [("/v1/completions", 'data: {"error":'), ("/v1/messages", 'event: error\ndata: {"type":"error","error":')],
)
def test_a_reader_that_is_too_slow_gets_an_error_event(
    monkeypatch: pytest.MonkeyPatch, path: str, beginning: str
) -> None:
    monkeypatch.setattr(response_store, "MAX_RESPONSE_BYTES", 5_000)

    async def scenario() -> None:
        async with Kept() as kept:
            stream, client = Events(40, size=1_000), Client(idempotency_key="k", path=path)
            may_send = asyncio.Event()
            send = client.send

            async def slowly(message: Any) -> None:
                await may_send.wait()
                await send(message)

            client.send = slowly  # type: ignore[method-assign]
            asking = asyncio.create_task(client.ask(kept.all, gives(stream)))
            stream.let(40)
            await settle()
            await settle()
            may_send.set()
            await asking
            assert "too slowly" in client.events[-1]
            assert client.received.decode().startswith(beginning)
            assert len(client.events) < 40

    asyncio.run(scenario())


def test_tokens_behind_the_last_read_event_count_as_wasted() -> None:
    """Each event of a stream has three tokens."""

    async def scenario() -> None:
        async with Kept(keep_seconds=0.01) as kept:
            whole, half, body = Events(4), Events(4), Response(b"no tokens are known of")
            readers = [Client(idempotency_key="whole"), Client(idempotency_key="half"), Client(idempotency_key="body")]
            asking = [
                asyncio.create_task(reader.ask(kept.all, gives(response)))
                for reader, response in zip(readers, (whole, half, body), strict=True)
            ]
            whole.let(4)
            half.let(1)
            await settle()
            readers[1].left.set()
            await asyncio.gather(asking[0], asking[1], asking[2])
            half.let(3)
            await settle()
            assert kept.wasted == []
            await asyncio.sleep(0.02)
            kept.all.discard_expired()
            await settle()
            assert sorted(kept.wasted) == [0, 0, 9]

    asyncio.run(scenario())


def test_unread_tokens_of_an_abandoned_stream_count_as_wasted() -> None:
    async def scenario() -> None:
        async with Kept(keep_seconds=0.01) as kept:
            stream, client = Events(4), Client(idempotency_key="k")
            asking = asyncio.create_task(client.ask(kept.all, gives(stream)))
            stream.let(1)
            await settle()
            client.left.set()
            await asking
            stream.let(2)
            await settle()
            await asyncio.sleep(0.02)
            kept.all.discard_expired()
            await settle()
            assert stream.was_abandoned
            assert kept.wasted == [6]

    asyncio.run(scenario())
