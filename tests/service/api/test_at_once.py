"""Direct writes: stream events written as soon as their deltas arrive, without waking the response's task."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from model.chat.output_parser import OutputParser
from model.chat.reasoning import REASONING_FORMATS
from model.chat.tool_formats.table import DEFAULT_FORMAT
from model.tokenizer.interface import Tokenizer
from service.api.messages_builder import MessagesBuilder
from service.api.response_builder import ChatBuilder, CompletionBuilder, ResponseBuilder
from service.api.responses_builder import ResponsesBuilder
from service.api.streaming import CompletionStream
from service.http.connection import chunked_body
from service.metrics.recorder import Metrics
from service.preprocess.chat_renderer import ChatPlan
from service.protocol.completions import CompletionRequest
from service.protocol.errors import ApiError
from service.protocol.responses import encode_event
from service.protocol.responses_request import ResponsesRequest
from service.requests.inflight import Deltas
from tests.service.api.test_streaming import RUNNING_USAGE, USAGE, Exchange, run, sample
from tests.service.desk import Desk
from tests.service.sequences import make_choice, make_delta, make_finish, make_request
from tests.service.wire import connect


class Body:
    """Response body that records the written parts."""

    def __init__(self) -> None:
        self.is_writable = True
        self.exchange: Exchange | None = None
        self.parts: list[bytes] = []

    def write(self, part: bytes) -> None:
        assert self.exchange is not None
        self.parts.append(part)
        self.exchange.client.body += part


def exchange_with(
    body: Body, tools: Any, builder: type[ResponseBuilder] = CompletionBuilder, **fields: Any
) -> Exchange:
    scope: Scope = {"type": "http", "extensions": {"kvasir.chunked_body": body}}
    body.exchange = Exchange(CompletionStream, make_request(make_choice()), tools, builder, scope, **fields)
    return body.exchange


@pytest.fixture
def tools(tokenizer: Tokenizer, metrics: Metrics) -> tuple[Tokenizer, Metrics]:
    return tokenizer, metrics


WANTS: list[dict[str, Any]] = [{}, USAGE, RUNNING_USAGE, {"return_token_ids": True}, {"logprobs": 0}]


@pytest.mark.parametrize("fields", WANTS, ids=str)
@pytest.mark.parametrize("builder", [CompletionBuilder, ChatBuilder])
def test_direct_writes_send_the_same_bytes_as_the_response_task(
    tools: Any, builder: type[ResponseBuilder], fields: dict[str, Any]
) -> None:
    async def test() -> None:
        body = Body()
        slow = Exchange(CompletionStream, make_request(make_choice()), tools, builder, **fields)
        fast = exchange_with(body, tools, builder, **fields)
        for text in ("a", 'b"\n', "", "\u2028é", "😀"):
            for exchange in (slow, fast):
                exchange.push(ids=(97,), text=text, logprobs=())
            await slow.settle()
        for exchange in (slow, fast):
            finish = make_finish(decode_seconds=0.0)
            exchange.push(ids=(98,), text="z", logprobs=(), finish=finish)
            await exchange.task
        assert without_times(fast.client.body) == without_times(slow.client.body)
        assert fast.client.is_complete
        assert len(body.parts) == (4 if fields.get("return_token_ids") or "logprobs" in fields else 3)
        assert sample(tools[1], "llm_inter_token_latency_seconds_count") == 2 * 5

    run(test)


def without_times(body: bytes) -> list[bytes]:
    return [event.partition(b'"timings"')[0] for event in body.split(b"\n\n")]


def test_events_of_a_step_are_written_in_the_same_event_loop_turn(tools: Any) -> None:
    async def test() -> None:
        body = Body()
        exchange = exchange_with(body, tools)
        exchange.push(ids=(97,), text="a")
        assert not exchange.client.events, "the head is the task's"
        await exchange.settle()
        exchange.push(ids=(98,), text="b")
        assert len(exchange.client.events) == 2
        exchange.push(ids=(99,), text="c", finish=make_finish())
        assert len(exchange.client.events) == 2, "the end is the task's"
        await exchange.task
        assert [chunk["choices"][0]["text"] for chunk in exchange.client.chunks] == ["a", "b", "c"]
        assert len(body.parts) == 1

    run(test)


def test_the_response_task_sends_all_events_in_order_to_a_slow_client(tools: Any) -> None:
    async def test() -> None:
        body = Body()
        exchange = exchange_with(body, tools)
        exchange.push(ids=(97,), text="a")
        await exchange.settle()
        body.is_writable = False
        exchange.push(ids=(98,), text="b")
        body.is_writable = True
        exchange.push(ids=(99,), text="c")  # "b" waits for the response task, so "c" must wait behind it
        assert len(exchange.client.events) == 1
        await exchange.settle()
        exchange.push(ids=(100,), text="d")
        assert [chunk["choices"][0]["text"] for chunk in exchange.client.chunks] == ["a", "b", "c", "d"]
        assert len(body.parts) == 1
        exchange.client.left.set()
        await exchange.task

    run(test)


def test_a_failing_direct_write_affects_no_other_response() -> None:
    async def test() -> None:
        desk = Desk()
        written: list[Any] = []

        def fail(news: Deltas) -> Callable[[], None]:
            raise RuntimeError("a bug")

        def write(news: Deltas) -> Callable[[], None]:
            return partial(written.extend, [delta.text for _, delta in news])

        ill, well = desk.submit(make_choice("a")), desk.submit(make_choice("b"))
        waits = [asyncio.create_task(ill.next_deltas(fail)), asyncio.create_task(well.next_deltas(write))]
        await asyncio.sleep(0)
        desk.engine_client.receive([make_delta("a", ids=(1,), text="A"), make_delta("b", ids=(1,), text="B")])
        assert written == ["B"]
        with pytest.raises(ApiError, match="internal error"):
            await waits[0]
        assert not waits[1].done()
        waits[1].cancel()

    run(test)


@pytest.mark.parametrize("builder", [CompletionBuilder, ChatBuilder])
@pytest.mark.parametrize("text", ["a", 'say "hi"\\', "\x85\u2028\u2029", "\0text\0", "é😀\n"])
def test_a_plain_event_equals_the_encoded_event_of_its_delta(
    tokenizer: Tokenizer, builder: type[ResponseBuilder], text: str
) -> None:
    asked = CompletionRequest(prompt="a")
    words = builder(asked, response_id="cmpl-1", created=5, model="\0text\0", tokenizer=tokenizer)
    for choice in (make_choice(), make_choice("b", index=1)):
        (event,) = words.events(choice, make_delta(ids=(1,), text=text), is_first=False)
        assert words.plain_event(choice, text) == encode_event(event)


@pytest.mark.parametrize(
    "builder",
    [
        ChatBuilder,
        partial(MessagesBuilder, request_id=None),
        partial(ResponsesBuilder, origin=ResponsesRequest(input="a"), record=None),
    ],
    ids=["chat", "messages", "responses"],
)
@pytest.mark.parametrize("index", [0, 1])
def test_plain_events_of_reasoning_text_and_calls_equal_the_encoded_events(
    tokenizer: Tokenizer, builder: Callable[..., ChatBuilder], index: int
) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "some text"}}\n</tool_call>'
    whole = f"<think>\nI see it.\n</think>\n\nHello you.\n{call}\n{call}"
    new_parser = partial(OutputParser, reasoning=REASONING_FORMATS["think"], tools=DEFAULT_FORMAT)
    chat = ChatPlan(token_ids=[1], new_parser=new_parser)
    about: dict[str, Any] = {"response_id": "x-1", "created": 5, "model": "m", "tokenizer": tokenizer, "chat": chat}
    asked, choice = CompletionRequest(prompt="a"), make_choice(index=index)
    for length in (1, 2, 3, 5):
        plain, encoded = builder(asked, **about), builder(asked, **about)
        for start in range(0, len(whole), length):
            text = whole[start : start + length]
            events = encoded.events(choice, make_delta(ids=(1,), text=text), is_first=False)
            assert plain.plain_event(choice, text) == b"".join(map(encoded.encode, events))


async def twice(scope: Scope, receive: Receive, send: Send) -> None:
    """Send the same bytes by `send` and by direct writes, and record whether the body was writable."""
    body = chunked_body(scope)
    assert body is not None
    states = [body.is_writable]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    states.append(body.is_writable)
    await send({"type": "http.response.body", "body": b"a" * 20, "more_body": True})
    if body.is_writable:
        body.write(b"a" * 20)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    scope["states"] = [*states, body.is_writable]


def ask(version: str) -> tuple[list[bool], bytes]:
    seen: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await twice(scope, receive, send)
        seen.update(scope)

    async def talk() -> bytes:
        protocol, wire = connect(app, ServerState())
        protocol.data_received(f"GET / HTTP/{version}\r\nhost: a\r\n\r\n".encode())
        await asyncio.wait(set(protocol.tasks))
        protocol.connection_lost(None)
        return wire.written

    written = asyncio.run(talk())
    return seen["states"], written.partition(b"\r\n\r\n")[2]


def test_a_direct_write_is_framed_like_a_send() -> None:
    chunk = b"14\r\n" + b"a" * 20 + b"\r\n"
    assert ask("1.1") == ([False, True, False], chunk + chunk + b"0\r\n\r\n")


def test_http_1_0_clients_get_no_direct_writes() -> None:
    assert ask("1.0") == ([False, False, False], b"a" * 20)


@pytest.mark.parametrize("trouble", ["behind", "gone", "closing"])
def test_a_body_is_not_writable_when_the_client_is_slow_or_gone(trouble: str) -> None:
    states: list[bool] = []

    async def test() -> None:
        go = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            body = chunked_body(scope)
            assert body is not None
            await send({"type": "http.response.start", "status": 200, "headers": []})
            states.append(body.is_writable)
            await go.wait()
            states.append(body.is_writable)
            protocol.resume_writing()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        protocol, wire = connect(app, ServerState())
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if trouble == "behind":
            protocol.pause_writing()
        elif trouble == "gone":
            protocol.connection_lost(None)
        else:
            wire.close()
        go.set()
        await asyncio.wait(set(protocol.tasks))
        protocol.connection_lost(None)

    run(test)
    assert states == [True, False]
