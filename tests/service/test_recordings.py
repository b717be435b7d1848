"""Answers that outlive a connection: resumed by event id, repeated by key, and let go of in time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service import recordings
from service.errors import AnswerGone, ApiError, EngineFailed, InvalidRequest, KeyReused
from service.recordings import Recordings
from service.responses import KEEP_ALIVE, encode_event


class Client:
    """One connection: a request, and what comes back until it leaves."""

    def __init__(
        self, *, body: bytes = b"{}", key_name: str = "", path: str = "/v1/completions", **headers: str
    ) -> None:
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": raw, "query_string": b""}
        self.scope |= {"server": ("localhost", 80), "state": {"api_key_name": key_name}}
        self.body = body
        self.left = asyncio.Event()
        self.headers: dict[str, str] = {}
        self.received = b""
        self.is_complete = False

    async def ask(self, kept: Recordings, make: Callable[[], Coroutine[Any, Any, Response]]) -> None:
        response = await kept.answer(Request(self.scope), self.body, make)
        await response(self.scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.received += message["body"]
            self.is_complete = not message["more_body"]

    @property
    def ids(self) -> list[str]:
        return [line.removeprefix("id: ") for line in self.received.decode().split("\n") if line.startswith("id: ")]

    @property
    def events(self) -> list[str]:
        return [line for line in self.received.decode().split("\n") if line.startswith("data: ")]


class Events(Response):
    """A stream whose events are let through one by one; it ends when its client leaves."""

    media_type = "text/event-stream"

    def __init__(self, count: int, *, size: int = 1) -> None:
        super().__init__()
        self.raw_headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        self.count, self.size = count, size
        self.gate = asyncio.Semaphore(0)
        self.was_abandoned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivering = asyncio.create_task(self._deliver(send))
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait([delivering, leaving], return_when=asyncio.FIRST_COMPLETED)
        self.was_abandoned = not delivering.done()
        for task in (delivering, leaving):
            task.cancel()

    async def _deliver(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for number in range(self.count):
            await self.gate.acquire()
            event = encode_event({"n": number, "text": "x" * self.size})
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def let(self, count: int) -> None:
        for _ in range(count):
            self.gate.release()


class Kept:
    """Recordings, and what they counted; closed at the end."""

    def __init__(self, keep_seconds: float = 60.0) -> None:
        self.counted: list[str] = []
        self.all = Recordings(keep_seconds=keep_seconds, count=self.counted.append)

    async def __aenter__(self) -> "Kept":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.all.close()


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def _gives(response: Response) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def make() -> Response:
        return response

    return make


async def _never() -> Response:
    raise AssertionError("nothing is to be made anew")


def test_a_lost_stream_goes_on_after_the_event_that_was_seen_last() -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            stream, first = Events(6), Client(accept="text/event-stream")
            asking = asyncio.create_task(first.ask(kept.all, _gives(stream)))
            stream.let(3)
            await _settle()
            assert first.events == [f'data: {{"n":{n},"text":"x"}}' for n in range(3)]
            assert len(first.ids) == 3
            first.left.set()
            await asking
            stream.let(1)  # goes on while nobody is there
            await _settle()
            assert not stream.was_abandoned
            second = Client(body=b"", last_event_id=first.ids[1])
            asking = asyncio.create_task(second.ask(kept.all, _never))
            await _settle()
            stream.let(2)
            await asking
            assert second.is_complete
            assert [event[:12] for event in second.events] == [f'data: {{"n":{n}' for n in (2, 3, 4, 5)]
            assert second.ids[0] == first.ids[2]
            assert second.headers["idempotent-replayed"] == "true"
            assert "idempotent-replayed" not in first.headers
            assert kept.counted == ["event_id"]

    asyncio.run(scenario())


def test_a_retry_under_the_same_key_does_not_begin_anew_while_it_runs_or_after() -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            stream = Events(3)
            clients = [Client(idempotency_key="k") for _ in range(3)]
            asking = [asyncio.create_task(clients[0].ask(kept.all, _gives(stream)))]
            await _settle()
            asking.append(asyncio.create_task(clients[1].ask(kept.all, _never)))
            stream.let(3)
            await asyncio.gather(*asking)
            await clients[2].ask(kept.all, _never)
            assert clients[0].events == clients[1].events == clients[2].events
            assert clients[0].ids == clients[1].ids == clients[2].ids
            assert kept.counted == ["key", "key"]

    asyncio.run(scenario())


def test_a_body_is_repeated_byte_for_byte() -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            clients = [Client(idempotency_key="k"), Client(idempotency_key="k")]
            await clients[0].ask(kept.all, _gives(Response(b'{"a": 1}', media_type="application/json")))
            await clients[1].ask(kept.all, _never)
            for client in clients:
                assert client.received == b'{"a": 1}'
                assert client.headers["content-length"] == "8"

    asyncio.run(scenario())


def test_requests_that_ask_for_nothing_of_this_are_answered_as_ever() -> None:
    async def scenario() -> None:
        async with Kept() as kept, Kept(keep_seconds=0.0) as off:
            for client, among in (
                (Client(), kept),
                (Client(accept="application/json, */*"), kept),
                (Client(accept="application/json, text/event-stream"), kept),  # reads either: ids mean nothing to it
                (Client(accept="text/event-stream", idempotency_key="k"), off),
            ):
                stream = Events(2)
                asking = asyncio.create_task(client.ask(among.all, _gives(stream)))
                stream.let(1)
                await _settle()
                assert not client.ids
                client.left.set()
                await asking
                assert stream.was_abandoned

    asyncio.run(scenario())


def test_an_error_is_told_to_everybody_who_waits_and_not_kept() -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            gate = asyncio.Event()

            async def fails() -> Response:
                await gate.wait()
                raise EngineFailed("no", retry=True)

            asking = [asyncio.create_task(Client(idempotency_key="k").ask(kept.all, fails)) for _ in range(2)]
            await _settle()
            gate.set()
            for result in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(result, EngineFailed)
            again = Client(idempotency_key="k")
            await again.ask(kept.all, _gives(Response(b"yes")))
            assert again.received == b"yes"

    asyncio.run(scenario())


def test_an_error_that_nobody_was_there_to_hear_is_not_kept_either() -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            gate = asyncio.Event()

            async def fails() -> Response:
                await gate.wait()
                raise EngineFailed("no", retry=True)

            client = Client(idempotency_key="k")
            asking = asyncio.create_task(client.ask(kept.all, fails))
            await _settle()
            client.left.set()
            await asking
            gate.set()
            await _settle()
            again = Client(idempotency_key="k")
            await again.ask(kept.all, _gives(Response(b"yes")))
            assert again.received == b"yes"

    asyncio.run(scenario())


def test_a_stream_that_ended_with_an_error_is_not_repeated() -> None:
    class Broken(Events):
        async def _deliver(self, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            error = encode_event(EngineFailed("no", retry=True).body())
            await send({"type": "http.response.body", "body": error, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def scenario() -> None:
        async with Kept() as kept:
            client = Client(idempotency_key="k")
            await client.ask(kept.all, _gives(Broken(0)))
            assert '"engine_failed"' in client.events[0]
            again = Client(idempotency_key="k")
            await again.ask(kept.all, _gives(Response(b"yes")))
            assert again.received == b"yes"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("client", "error"),
    [
        ({"idempotency_key": "k", "body": b"{ }"}, KeyReused),
        ({"idempotency_key": "k", "path": "/v1/chat/completions"}, KeyReused),
        ({"idempotency_key": "k", "x_request_timeout": "0"}, KeyReused),
        ({"idempotency_key": "k" * 256}, InvalidRequest),
        ({"idempotency_key": "a b"}, InvalidRequest),
        ({"idempotency_key": ""}, InvalidRequest),
        ({"last_event_id": "17"}, InvalidRequest),
        ({"last_event_id": "0" * 32 + "/0"}, AnswerGone),
        ({"last_event_id": "ID/99"}, AnswerGone),
        ({"last_event_id": "ID/0", "key_name": "somebody else"}, AnswerGone),
        ({"last_event_id": "ID/0", "body": b"other"}, InvalidRequest),
        ({"last_event_id": "ID/0", "body": b"", "path": "/v1/chat/completions"}, InvalidRequest),
    ],
)
def test_what_does_not_fit_is_refused(client: dict[str, Any], error: type[ApiError]) -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            stream, first = Events(2), Client(idempotency_key="k")
            stream.let(2)
            await first.ask(kept.all, _gives(stream))
            own = first.ids[0].partition("/")[0]
            asked = {
                name: value.replace("ID", own) if name == "last_event_id" else value for name, value in client.items()
            }
            with pytest.raises(error):
                await Client(**asked).ask(kept.all, _never)
            assert not kept.counted

    asyncio.run(scenario())


def test_keys_are_their_owners() -> None:
    async def scenario() -> None:
        async with Kept() as kept:
            for name in ("ann", "bob"):
                client = Client(idempotency_key="k", key_name=name)
                await client.ask(kept.all, _gives(Response(name.encode())))
                assert client.received == name.encode()

    asyncio.run(scenario())


def test_who_does_not_come_back_in_time_is_given_up() -> None:
    async def scenario() -> None:
        async with Kept(keep_seconds=0.01) as kept:
            stream, client = Events(2), Client(idempotency_key="k")
            asking = asyncio.create_task(client.ask(kept.all, _gives(stream)))
            stream.let(1)
            await _settle()
            await asyncio.sleep(0.02)
            kept.all.tend()
            await _settle()
            assert not stream.was_abandoned, "somebody is reading"
            client.left.set()
            await asking
            await asyncio.sleep(0.02)
            kept.all.tend()
            await _settle()
            assert stream.was_abandoned
            with pytest.raises(AnswerGone):
                await Client(last_event_id=client.ids[0]).ask(kept.all, _never)
            anew = Client(idempotency_key="k")
            await anew.ask(kept.all, _gives(Response(b"anew")))
            assert anew.received == b"anew"

    asyncio.run(scenario())


def test_signs_of_life_pass_and_are_not_kept() -> None:
    class Slow(Events):
        async def _deliver(self, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            await self.gate.acquire()
            await send({"type": "http.response.body", "body": encode_event({"n": 0}), "more_body": True})

    async def scenario() -> None:
        async with Kept() as kept:
            stream, client = Slow(1), Client(idempotency_key="k")
            asking = asyncio.create_task(client.ask(kept.all, _gives(stream)))
            await _settle()
            assert client.received == KEEP_ALIVE
            stream.let(1)
            await asking
            assert len(client.ids) == len(client.events) == 1
            assert client.ids[0].endswith("/0")

    asyncio.run(scenario())


def test_memory_is_bounded_and_who_is_too_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_ANSWER_BYTES", 5_000)
    monkeypatch.setattr(recordings, "MAX_KEPT_BYTES", 20_000)

    async def scenario() -> None:
        async with Kept() as kept:
            stream, client = Events(100, size=1_000), Client(idempotency_key="long")
            stream.let(100)
            await client.ask(kept.all, _gives(stream))
            assert "too slowly" in client.events[-1] or len(client.events) == 100
            with pytest.raises(AnswerGone):
                await Client(idempotency_key="long").ask(kept.all, _never)
            for number in range(5):
                await Client(idempotency_key=f"k{number}").ask(kept.all, _gives(Response(b"y" * 1_000)))
            kept.all.tend()
            oldest = Client(idempotency_key="k0")
            await oldest.ask(kept.all, _gives(Response(b"anew")))
            assert oldest.received == b"anew"
            newest = Client(idempotency_key="k4")
            await newest.ask(kept.all, _never)
            assert len(newest.received) == 1_000

    asyncio.run(scenario())


def test_a_reader_that_is_left_behind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_ANSWER_BYTES", 5_000)

    async def scenario() -> None:
        async with Kept() as kept:
            stream, client = Events(40, size=1_000), Client(idempotency_key="k")
            may_send = asyncio.Event()
            send = client._send

            async def slowly(message: Any) -> None:
                await may_send.wait()
                await send(message)

            client._send = slowly  # type: ignore[method-assign]
            asking = asyncio.create_task(client.ask(kept.all, _gives(stream)))
            stream.let(40)
            await _settle()
            await _settle()
            may_send.set()
            await asking
            assert "too slowly" in client.events[-1]
            assert len(client.events) < 40

    asyncio.run(scenario())
