"""Streamed and whole responses as a client receives them, with disconnects and errors."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from starlette.types import Scope

from model.tokenizer.interface import Tokenizer
from service.api.response_builder import CompletionBuilder, ResponseBuilder
from service.api.streaming import CompletionBody, CompletionStream
from service.ipc.messages import FinishReason, TokenLogprob
from service.metrics.recorder import Metrics
from service.protocol.completions import CompletionRequest
from service.protocol.errors import Draining, EngineFailed
from service.protocol.responses import Completion, encode_event
from service.requests.inflight import InflightRequest
from tests.service.sequences import make_choice, make_delta, make_finish, make_request

# Fields of a request for usage in a stream's last event, and in every event.
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
RUNNING_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"continuous_usage_stats": True}}


class Client:
    """Client of an ASGI response."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.status
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert self.status
            assert not self.is_complete
            self.body += message["body"]
            self.is_complete = not message["more_body"]

    @property
    def events(self) -> list[str]:
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == "", "every event ends with a blank line"
        return parts

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(e.removeprefix("data: ")) for e in self.events if e.startswith("data: {")]


class Exchange:
    """One request, its response, and the client that receives the response. The test pushes the deltas."""

    def __init__(
        self,
        kind: type[CompletionBody | CompletionStream],
        request: InflightRequest,
        tools: Any,
        builder: type[ResponseBuilder] = CompletionBuilder,
        scope: Scope | None = None,
        **fields: Any,
    ) -> None:
        tokenizer, metrics = tools
        asked = CompletionRequest.parse(json.dumps({"prompt": "a", **fields}).encode())
        words = builder(asked, response_id="cmpl-1", created=5, model="tiny", tokenizer=tokenizer)
        self.request = request
        self.closed: list[InflightRequest] = []
        self.client = Client()
        response = kind(request, words, metrics=metrics, finish=self.closed.append)
        self.task = asyncio.create_task(response(scope or {}, self.client.receive, self.client.send))

    def push(self, index: int = 0, **delta: Any) -> None:
        """Add a delta to its choice and deliver it to the response, as the engine client does."""
        choice = self.request.choices[index]
        event = make_delta(index=len(choice.token_ids), **delta)
        choice.add(event)
        self.request.push(choice, event)
        if (send := self.request.deliver()) is not None:
            send()

    async def settle(self) -> None:
        """Run the event loop until the delivery waits."""
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
def tools(tokenizer: Tokenizer, metrics: Metrics) -> tuple[Tokenizer, Metrics]:
    return tokenizer, metrics


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    """Return a metric's value, summed over the series with the given labels."""
    lines = metrics.render()[0].decode().splitlines()
    found = [line for line in lines if line.partition("{")[0].partition(" ")[0] == name]
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(line.rpartition(" ")[2]) for line in found if all(want in line for want in wanted))


def test_a_stream_has_one_event_per_delta_then_usage_then_done(tools: Any) -> None:
    async def test() -> None:
        exchange = Exchange(CompletionStream, make_request(make_choice()), tools, **USAGE)
        exchange.push(ids=(97,), text="a")
        await exchange.settle()
        assert exchange.client.status == 200
        assert len(exchange.client.events) == 1, "the first event does not wait for the second"
        exchange.push(ids=(98,), text="b")
        exchange.push(ids=(99,), text="c", finish=make_finish(FinishReason.STOP, stop_reason="x", num_cached_tokens=2))
        await exchange.task
        client = exchange.client
        assert client.is_complete
        assert client.headers == {
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            "content-type": "text/event-stream; charset=utf-8",
        }
        assert client.events[-1] == "data: [DONE]"
        first, second, third, summary = client.chunks
        assert first == {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 5,
            "model": "tiny",
            "choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None, "stop_reason": None}],
        }
        assert second["choices"][0]["text"] == "b"
        assert (third["choices"][0]["finish_reason"], third["choices"][0]["stop_reason"]) == ("stop", "x")
        assert third["timings"]["decode_ms"] == 500
        assert third["timings"]["tokens_per_second"] == 4.0
        assert summary["choices"] == []
        assert summary["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        assert summary["timings"] == third["timings"]
        assert exchange.closed == [exchange.request]

    run(test)


def test_a_stream_of_one_delta_has_the_same_timings_in_both_events(tools: Any) -> None:
    async def test() -> None:
        exchange = Exchange(CompletionStream, make_request(make_choice()), tools, **USAGE)
        exchange.push(ids=(97, 98), text="ab", finish=make_finish())
        await exchange.task
        whole, summary = exchange.client.chunks
        assert summary["timings"] == whole["timings"]

    run(test)


def test_deltas_without_text_send_no_event(tools: Any) -> None:
    async def test() -> None:
        exchange = Exchange(CompletionStream, make_request(make_choice("a"), make_choice("b", index=1)), tools)
        exchange.push(0, ids=(0xF0,))
        await exchange.settle()
        assert exchange.client.body == b""
        exchange.push(1, ids=(98,), text="b")
        exchange.push(0, ids=(97,), text="\ufffda", finish=make_finish())
        exchange.push(1, ids=(98,), text="", finish=make_finish(FinishReason.STOP))
        await exchange.task
        seen = [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in exchange.client.chunks]
        assert seen == [(1, "b"), (0, "\ufffda"), (1, "")]
        assert [c["choices"][0]["finish_reason"] for c in exchange.client.chunks] == [None, "length", "stop"]
        assert ["timings" in c for c in exchange.client.chunks] == [False, False, True]

    run(test)


def test_a_json_body_joins_the_deltas(tools: Any) -> None:
    async def test() -> None:
        exchange = Exchange(CompletionBody, make_request(make_choice("a"), make_choice("b", index=1)), tools)
        exchange.push(1, ids=(98,), text="b")
        exchange.push(0, ids=(97,), text="a")
        exchange.push(0, ids=(97,), text="aa", finish=make_finish())
        await exchange.settle()
        assert exchange.client.status == 0, "the status waits for the last choice"
        exchange.push(1, ids=(98,), text="", finish=make_finish(FinishReason.STOP, stop_reason=7))
        await exchange.task
        client = exchange.client
        assert client.headers["content-length"] == str(len(client.body))
        body = msgspec.json.decode(client.body, type=Completion)
        assert [(c.index, c.text, c.finish_reason, c.stop_reason) for c in body.choices] == [
            (0, "aaa", "length", None),
            (1, "b", "stop", 7),
        ]
        # Two samples of one prompt: the prompt counts once.
        assert isinstance(body.usage, msgspec.Struct)
        assert (body.usage.prompt_tokens, body.usage.completion_tokens) == (3, 4)

    run(test)


def _logprob(token_id: int, logprob: float | None = -1.0) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=logprob, rank=None if logprob is None else 1, top=())


@pytest.mark.parametrize("kind", [CompletionBody, CompletionStream])
def test_echo_with_logprobs_begins_with_the_prompt(kind: Any, tools: Any) -> None:
    async def test() -> None:
        choice = make_choice(text="abc", prompt=(97, 98, 99))
        exchange = Exchange(kind, make_request(choice), tools, echo=True, logprobs=0)
        exchange.push(prompt_logprobs=(_logprob(97, None), _logprob(98)))
        await exchange.settle()
        assert exchange.client.status == 0
        exchange.push(prompt_logprobs=(_logprob(99),), ids=(100,), text="d", logprobs=(_logprob(100, -3.0),))
        exchange.push(ids=(101,), text="e", logprobs=(_logprob(101),), finish=make_finish())
        await exchange.task
        bodies = [json.loads(exchange.client.body)] if kind is CompletionBody else exchange.client.chunks
        choices = [body["choices"][0] for body in bodies]
        assert "".join(c["text"] for c in choices) == "abcde"
        joined = {key: [x for c in choices for x in c["logprobs"][key]] for key in choices[0]["logprobs"]}
        assert joined["tokens"] == ["a", "b", "c", "d", "e"]
        assert joined["token_logprobs"] == [None, -1.0, -1.0, -3.0, -1.0]
        assert joined["text_offset"] == [0, 1, 2, 3, 4]
        assert joined["top_logprobs"][3] == {"d": -3.0}

    run(test)


@pytest.mark.parametrize("kind", [CompletionBody, CompletionStream])
def test_echo_with_max_tokens_0_returns_only_the_prompt(kind: Any, tools: Any) -> None:
    async def test() -> None:
        exchange = Exchange(kind, make_request(make_choice(text="abc", max_tokens=0)), tools, echo=True)
        exchange.push(finish=make_finish(num_completion_tokens=0, decode_seconds=0.0))
        await exchange.task
        body = json.loads(exchange.client.body) if kind is CompletionBody else exchange.client.chunks[0]
        assert body["choices"][0]["text"] == "abc"
        assert body["choices"][0]["finish_reason"] == "length"
        assert (body["timings"]["ttft_ms"], body["timings"]["tokens_per_second"]) == (None, None)

    run(test)


@pytest.mark.parametrize("kind", [CompletionBody, CompletionStream])
@pytest.mark.parametrize("has_started", [False, True])
def test_a_disconnect_ends_the_request(kind: Any, has_started: bool, tools: Any) -> None:
    async def test() -> None:
        exchange = Exchange(kind, make_request(make_choice()), tools)
        if has_started:
            exchange.push(ids=(97,), text="a")
        await exchange.settle()
        exchange.client.left.set()
        if has_started:
            exchange.push(ids=(98, 99), text="bc")  # arrives after the client has disconnected
        await exchange.task
        assert exchange.closed == [exchange.request]
        assert not exchange.client.is_complete
        phase = "running" if has_started else "waiting"
        assert sample(tools[1], "llm_requests_cancelled_total", phase=phase) == 1
        undelivered = (3 if kind is CompletionBody else 2) if has_started else 0
        assert sample(tools[1], "llm_wasted_tokens_total", reason="cancelled") == undelivered

    run(test)


@pytest.mark.parametrize("kind", [CompletionBody, CompletionStream])
def test_a_failure_before_the_first_event_is_an_http_error(kind: Any, tools: Any) -> None:
    async def test() -> None:
        exchange = Exchange(kind, make_request(make_choice()), tools)
        exchange.request.fail(EngineFailed("it broke", retry=True))
        with pytest.raises(EngineFailed):
            await exchange.task
        assert exchange.client.status == 0
        assert exchange.closed == [exchange.request]

    run(test)


def test_a_failure_within_a_stream_is_the_last_event_without_done(tools: Any) -> None:
    async def test() -> None:
        exchange = Exchange(CompletionStream, make_request(make_choice()), tools)
        exchange.push(ids=(97,), text="a")
        await exchange.settle()
        exchange.request.fail(Draining("going down", retry_after_seconds=1))
        await exchange.task
        assert exchange.client.is_complete
        assert json.loads(exchange.client.events[-1].removeprefix("data: ")) == {
            "error": {"message": "going down", "type": "server_error", "param": None, "code": "draining"}
        }
        assert b"[DONE]" not in exchange.client.body
        assert sample(tools[1], "llm_request_failures_total", status="503") == 1

    run(test)


def test_a_silent_stream_sends_keep_alive_comments(tools: Any) -> None:
    async def test() -> None:
        exchange = Exchange(CompletionStream, make_request(make_choice()), tools)
        await exchange.settle()
        exchange.request.wake.set()
        await exchange.settle()
        assert (exchange.client.status, exchange.client.body) == (200, b": keep-alive\n\n")
        exchange.push(ids=(97,), text="a", finish=make_finish())
        await exchange.task
        assert [chunk["choices"][0]["text"] for chunk in exchange.client.chunks] == ["a"]

    run(test)


def test_latency_metrics_count_the_first_token_and_later_gaps(tools: Any) -> None:
    async def test() -> None:
        exchange = Exchange(CompletionStream, make_request(make_choice("a"), make_choice("b", index=1)), tools)
        for index in (0, 1):
            exchange.push(index, ids=(97,), text="a")
            exchange.push(index, ids=(97, 98, 99), text="abc")
            exchange.push(index, ids=(97,), text="a", finish=make_finish(num_completion_tokens=5))
        await exchange.task
        assert sample(tools[1], "llm_time_to_first_token_seconds_count") == 2
        assert sample(tools[1], "llm_inter_token_latency_seconds_count") == 2 * (5 - 1)
        assert sample(tools[1], "llm_e2e_request_latency_seconds_count") == 2
        assert sample(tools[1], "llm_request_success_total", finished_reason="length") == 2

    run(test)


def test_a_cancelled_response_task_finishes_the_request(tools: Any) -> None:
    async def test() -> None:
        exchange = Exchange(CompletionStream, make_request(make_choice()), tools)
        await exchange.settle()
        exchange.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.task
        assert exchange.closed == [exchange.request]

    run(test)


def test_an_event_contains_no_unicode_line_breaks() -> None:
    text = "".join(map(chr, range(0x3000)))
    event = encode_event({"text": text})
    assert len(event.decode().splitlines()) == 2, "the data and the blank line"
    assert json.loads(event.removeprefix(b"data: ")) == {"text": text}
