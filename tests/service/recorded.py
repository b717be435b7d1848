"""Clients of a response store, and SSE responses that send an event only when the test permits it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.protocol.responses import encode_event
from service.requests.response_store import ResponseStore


class Client:
    """Client connection: its request, and the response that it has received until it disconnects."""

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

    async def ask(self, kept: ResponseStore, make: Callable[[], Coroutine[Any, Any, Response]]) -> None:
        response = await kept.answer(Request(self.scope), self.body, make)
        await response(self.scope, self.receive, self.send)

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
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
    """SSE response that sends as many events as `let` permits. It ends early if its client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, count: int, *, size: int = 1) -> None:
        super().__init__()
        self.raw_headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        self.count, self.size = count, size
        self.gate = asyncio.Semaphore(0)
        self.num_sent_tokens = 0
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
            self.num_sent_tokens += 3
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def let(self, count: int) -> None:
        for _ in range(count):
            self.gate.release()


class Kept:
    """Response store that is closed at the end of the `async with`, and what it has counted."""

    def __init__(self, keep_seconds: float = 60.0) -> None:
        self.counted: list[str] = []
        self.wasted: list[int] = []
        self.all = ResponseStore(keep_seconds=keep_seconds, count=self.counted.append, waste=self.wasted.append)

    async def __aenter__(self) -> "Kept":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.all.close()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def gives(response: Response) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def make() -> Response:
        return response

    return make


async def never() -> Response:
    raise AssertionError("a buffered response was computed again")
