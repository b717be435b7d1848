"""Buffered responses: resumed by event id, repeated by idempotency key."""

import asyncio
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Send

from service.protocol.errors import ApiError, IdempotencyKeyReused, InvalidRequest, ResponseGone
from service.protocol.responses import KEEP_ALIVE, encode_event
from tests.service.recorded import Client, Events, Kept, gives, never, settle


def test_a_lost_stream_resumes_after_the_last_event_id() -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            stream, first = Events(6), Client(accept="text/event-stream")
            asking = asyncio.create_task(first.ask(kept.all, gives(stream)))
            stream.let(3)
            await settle()
            assert first.events == [f'data: {{"n":{n},"text":"x"}}' for n in range(3)]
            assert len(first.ids) == 3
            first.left.set()
            await asking
            stream.let(1)  # the generation continues without a connection
            await settle()
            assert not stream.was_abandoned
            second = Client(body=b"", last_event_id=first.ids[1])
            asking = asyncio.create_task(second.ask(kept.all, never))
            await settle()
            stream.let(2)
            await asking
            assert second.is_complete
            assert [event[:12] for event in second.events] == [f'data: {{"n":{n}' for n in (2, 3, 4, 5)]
            assert second.ids[0] == first.ids[2]
            assert second.headers["idempotent-replayed"] == "true"
            assert "idempotent-replayed" not in first.headers
            assert kept.counted == ["event_id"]

    asyncio.run(scenario())


def test_a_retry_under_the_same_key_is_not_generated_twice() -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            stream = Events(3)
            clients = [Client(idempotency_key="k") for _ in range(3)]
            asking = [asyncio.create_task(clients[0].ask(kept.all, gives(stream)))]
            await settle()
            asking.append(asyncio.create_task(clients[1].ask(kept.all, never)))
            stream.let(3)
            await asyncio.gather(*asking)
            await clients[2].ask(kept.all, never)
            assert clients[0].events == clients[1].events == clients[2].events
            assert clients[0].ids == clients[1].ids == clients[2].ids
            assert kept.counted == ["key", "key"]

    asyncio.run(scenario())


def test_a_json_response_is_repeated_byte_for_byte() -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            clients = [Client(idempotency_key="k"), Client(idempotency_key="k")]
            await clients[0].ask(kept.all, gives(Response(b'{"a": 1}', media_type="application/json")))
            await clients[1].ask(kept.all, never)
            for client in clients:
                assert client.received == b'{"a": 1}'
                assert client.headers["content-length"] == "8"

    asyncio.run(scenario())


def test_a_request_without_key_or_event_stream_is_not_buffered() -> None:
    async def scenario() -> None:
        async with Kept() as kept, Kept(keep_seconds=0.0) as off:
            for client, among in (
                (Client(), kept),
                (Client(accept="application/json, */*"), kept),
                (Client(accept="application/json, text/event-stream"), kept),  # may not know event ids
                (Client(accept="text/event-stream", idempotency_key="k"), off),
            ):
                stream = Events(2)
                asking = asyncio.create_task(client.ask(among.all, gives(stream)))
                stream.let(1)
                await settle()
                assert not client.ids
                client.left.set()
                await asking
                assert stream.was_abandoned

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("client", "error"),
    [
        ({"idempotency_key": "k", "body": b"{ }"}, IdempotencyKeyReused),
        ({"idempotency_key": "k", "path": "/v1/chat/completions"}, IdempotencyKeyReused),
        ({"idempotency_key": "k", "x_request_timeout": "0"}, IdempotencyKeyReused),
        ({"idempotency_key": "k" * 256}, InvalidRequest),
        ({"idempotency_key": "a b"}, InvalidRequest),
        ({"idempotency_key": ""}, InvalidRequest),
        ({"last_event_id": "17"}, InvalidRequest),
        ({"last_event_id": "0" * 32 + "/0"}, ResponseGone),
        ({"last_event_id": "ID/99"}, ResponseGone),
        ({"last_event_id": "ID/0", "key_name": "somebody else"}, ResponseGone),
        ({"last_event_id": "ID/0", "body": b"other"}, InvalidRequest),
        ({"last_event_id": "ID/0", "body": b"", "path": "/v1/chat/completions"}, InvalidRequest),
    ],
)
def test_a_key_or_event_id_of_another_request_is_rejected(client: dict[str, Any], error: type[ApiError]) -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            stream, first = Events(2), Client(idempotency_key="k")
            stream.let(2)
            await first.ask(kept.all, gives(stream))
            own = first.ids[0].partition("/")[0]
            asked = {
                name: value.replace("ID", own) if name == "last_event_id" else value for name, value in client.items()
            }
            with pytest.raises(error):
                await Client(**asked).ask(kept.all, never)
            assert not kept.counted

    asyncio.run(scenario())


def test_idempotency_keys_are_separate_for_each_api_key() -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            for name in ("ann", "bob"):
                client = Client(idempotency_key="k", key_name=name)
                await client.ask(kept.all, gives(Response(name.encode())))
                assert client.received == name.encode()

    asyncio.run(scenario())


def test_keep_alive_comments_are_sent_and_not_buffered() -> None:
    class Slow(Events):
        async def _deliver(self, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            await self.gate.acquire()
            await send({"type": "http.response.body", "body": encode_event({"n": 0}), "more_body": True})

    async def scenario() -> None:
        async with Kept() as kept:
            stream, client = Slow(1), Client(idempotency_key="k")
            asking = asyncio.create_task(client.ask(kept.all, gives(stream)))
            await settle()
            assert client.received == KEEP_ALIVE
            stream.let(1)
            await asking
            assert len(client.ids) == len(client.events) == 1
            assert client.ids[0].endswith("/0")

    asyncio.run(scenario())
