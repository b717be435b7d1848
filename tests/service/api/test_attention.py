"""Route `/inspect/attention` with a worker that responds at once, late or never."""

import asyncio
import json
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from model.tokenizer.interface import Tokenizer
from service.admission.controller import Admission
from service.api.attention import MAX_INSPECTIONS, Inspection
from service.config.settings import ServeSettings
from service.http.request_io import install_error_handlers, read_body
from service.ipc.messages import (
    AttentionQuery,
    AttentionResult,
    Cancel,
    Command,
    CommandBatch,
    Started,
    decode_commands,
    decode_events,
    encode_commands,
    encode_events,
)
from service.preprocess.request_processor import RequestProcessor
from service.protocol.errors import ApiError, ClientGone, Draining, EngineFailed, Overloaded, QueueTimeout
from service.requests.engine_client import EngineClient
from tests.service.desk import fake_workers
from tests.service.sequences import make_delta, make_hello
from tests.tiny_model import tiny_config

ROUTE = "/inspect/attention"
MAX_TOKENS = 32


def even_weights(look: AttentionQuery) -> bytes:
    """Return the lower triangle of weights as the worker sends it: each token attends equally to all before it."""
    lengths = range(1, len(look.token_ids) + 1)
    return array("f", [1 / length for _ in look.heads for length in lengths for _ in range(length)]).tobytes()


class Bench:
    """Route handlers and a simulated worker. Messages are encoded in both directions, as in the service."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int = MAX_TOKENS) -> None:
        self.sent: list[Any] = []
        self.counts: list[int] = []
        self.is_draining = False
        self.weights: Callable[[AttentionQuery], bytes | None] = even_weights
        self.answers = True
        processor = RequestProcessor(tokenizer=tokenizer, model_name="tiny", max_context_length=256, max_num_choices=4)
        self.engine_client = EngineClient(
            **fake_workers(self._take),
            admission=Admission(max_num_running=1, max_waiting_requests=1, max_waiting_tokens=100),
            on_worker_ready=lambda hello, worker: None,
            on_engine=lambda event, worker: None,
            on_replay=lambda outcome: None,
            on_late=lambda num_tokens: None,
            on_count=self.counts.append,
        )
        context: Any = SimpleNamespace(
            processor=processor,
            served=SimpleNamespace(manifest=SimpleNamespace(config=tiny_config(274))),
            settings=ServeSettings(checkpoint=Path("none"), max_inspect_tokens=max_tokens),
            read_body=partial(read_body, max_bytes=100_000),
            reject_when_draining=self._refuse_when_draining,
            engine_client=self.engine_client,
        )
        self.inspection = Inspection(context)

    def _refuse_when_draining(self) -> None:
        if self.is_draining:
            raise Draining("the server is shutting down", retry_after_seconds=2.5)

    def _take(self, commands: Sequence[Command]) -> None:
        for command in decode_commands(encode_commands(CommandBatch(0, list(commands)))).commands:
            self.sent.append(command)
            if isinstance(command, AttentionQuery) and self.answers:
                looked = AttentionResult(uid=command.uid, weights=self.weights(command), compute_seconds=0.0125)
                self.engine_client.receive(decode_events(encode_events([looked])))

    def client(self) -> TestClient:
        app = FastAPI()
        install_error_handlers(app, lambda error: None)
        app.add_api_route(ROUTE, self.inspection.limits, methods=["GET"])
        app.add_api_route(ROUTE, self.inspection.attention, methods=["POST"])
        return TestClient(app, raise_server_exceptions=False)


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


@pytest.fixture
def client(bench: Bench) -> Iterator[TestClient]:
    with bench.client() as client:
        yield client


def request_of(body: dict[str, Any], *, leaves: bool = False) -> Request:
    """Return a request whose client stays connected, or disconnects after the body."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "headers": []}, receive)


def test_attention_weights_of_all_heads_are_causal_and_sum_to_1(client: TestClient, bench: Bench) -> None:
    body = client.post(ROUTE, json={"prompt": "the 😀", "layer": 1}).json()
    assert body["object"] == "attention"
    assert (body["layer"], body["heads"]) == (1, [0, 1, 2, 3])
    assert (body["num_layers"], body["num_heads"]) == (2, 4)
    assert len(body["tokens"]) == len(body["token_ids"]) > 2
    assert any(token.startswith("bytes:") for token in body["tokens"])
    assert body["timings"]["compute_ms"] == 12.5
    assert len(body["weights"]) == 4
    for square in body["weights"]:
        for t, row in enumerate(square):
            assert len(row) == len(body["tokens"])
            assert sum(row) == pytest.approx(1, abs=1e-5)
            assert row[t + 1 :] == [0.0] * (len(row) - t - 1)
    (look,) = bench.sent
    assert isinstance(look, AttentionQuery)
    assert (look.layer, look.heads, list(look.token_ids)) == (1, (0, 1, 2, 3), body["token_ids"])
    assert bench.counts == [1, 0]


@pytest.mark.parametrize("head", [2, "all", None])
def test_the_response_has_the_weights_of_the_requested_heads_only(client: TestClient, head: object) -> None:
    body = client.post(ROUTE, json={"prompt": [5, 6], "layer": 0, "head": head, "model": "tiny"}).json()
    assert body["heads"] == ([2] if head == 2 else [0, 1, 2, 3])
    assert body["weights"][0] == [[1.0, 0.0], [0.5, 0.5]]


def test_get_returns_the_limits_of_attention_inspection(client: TestClient) -> None:
    limits = {"model": "tiny", "num_layers": 2, "num_heads": 4, "max_tokens": MAX_TOKENS}
    assert client.get(ROUTE).json() == limits


def _with(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "layer": 0, **fields}).encode()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "the body is not valid JSON: EOF"),
        (b"[]", 400, "must be a JSON object"),
        (b'{"prompt": "a"}', 400, "layer is required"),
        (b'{"layer": 0}', 400, "prompt is required"),
        (_with(layer=2), 400, "attention layer 2 does not exist; this model has layers 0 to 1"),
        (_with(layer=-1), 400, "layer must be greater than or equal to 0"),
        (_with(layer=1.5), 400, "layer must be a whole number"),
        (_with(layer="1"), 400, "layer must be a whole number"),
        (_with(layer=True), 400, "layer must be a whole number"),
        (_with(layer=None), 400, "layer must be a whole number"),
        (b'{"prompt": "a", "layer": NaN}', 400, ""),
        (b'{"prompt": "a", "layer": 1e400}', 400, "layer"),
        (b'{"prompt": "a", "layer": ' + b"9" * 5000 + b"}", 400, ""),
        (_with(layer=2**40), 400, "layer must be less than"),
        (_with(head=4), 400, "attention head 4 does not exist; this model has heads 0 to 3"),
        (_with(head="x"), 400, 'head must be the index of a head, from 0, or "all"'),
        (_with(head="0"), 400, "head must be the index of a head"),
        (_with(head=-1), 400, "head must be the index of a head"),
        (_with(head=0.0), 400, "head must be the index of a head"),
        (_with(head=[0]), 400, "head must be the index of a head"),
        (_with(head=False), 400, "head must be the index of a head"),
        (_with(prompt=""), 400, "prompt must be a non-empty string or list of token ids"),
        (_with(prompt=[]), 400, "prompt must be a non-empty string or list of token ids"),
        (_with(prompt=["a"]), 400, "prompt must be a non-empty string or list of token ids"),
        (_with(prompt=[[1]]), 400, "prompt must be a non-empty string or list of token ids"),
        (_with(prompt=7), 400, "prompt must be a non-empty string or list of token ids"),
        (_with(prompt=[274]), 400, "out of vocabulary"),
        (_with(prompt=[-1]), 400, "out of vocabulary"),
        (_with(prompt=[1] * 33), 400, "attention inspection takes at most 32 tokens, but the prompt has 33"),
        (_with(prompt="z" * 33), 400, "attention inspection takes at most 32 tokens, but the prompt has 33"),
        (_with(prompt="z" * 90_000), 400, "32 tokens, but the prompt has at least 6924 tokens; shorten the prompt"),
        (_with(prompt="z" * 200_000), 413, "over the limit"),
        (b'{"prompt": "\\ud83d", "layer": 0}', 400, "not valid JSON"),
        (_with(colour="red"), 400, "unknown field: colour"),
        (_with(model="gpt-4"), 404, "does not exist"),
    ],
    ids=range(35),
)
def test_an_invalid_attention_query_is_rejected(
    client: TestClient, bench: Bench, body: bytes, status: int, said: str
) -> None:
    response = client.post(ROUTE, content=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert said in error["message"]
    assert len(error["message"]) < 300
    assert bench.sent == []


def test_disabled_attention_inspection_is_a_403(tokenizer: Tokenizer) -> None:
    with Bench(tokenizer, max_tokens=0).client() as client:
        for response in (client.get(ROUTE), client.post(ROUTE, json={"prompt": "a", "layer": 0})):
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "switched_off"
            assert "--max-inspect-tokens N, N above 0" in response.json()["error"]["message"]


def test_a_draining_server_rejects_attention_queries(client: TestClient, bench: Bench) -> None:
    bench.is_draining = True
    response = client.post(ROUTE, json={"prompt": "a", "layer": 0})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
    assert response.headers["retry-after"] == "3"
    assert bench.sent == []


def test_a_failed_attention_query_is_a_500(client: TestClient, bench: Bench) -> None:
    bench.weights = lambda look: None
    response = client.post(ROUTE, json={"prompt": "a", "layer": 0})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
    assert bench.counts == [1, 0]


async def waiting(bench: Bench, count: int, *, leaves: bool = False) -> list["asyncio.Task[Any]"]:
    """Send attention queries that the worker leaves unfinished."""
    bench.answers = False
    body = {"prompt": "a", "layer": 0}
    tasks = [asyncio.create_task(bench.inspection.attention(request_of(body, leaves=leaves))) for _ in range(count)]
    while len(bench.sent) < count and not all(task.done() for task in tasks):
        await asyncio.sleep(0)
    return tasks


def test_too_many_attention_queries_are_rejected(bench: Bench) -> None:
    async def crowd() -> None:
        tasks = await waiting(bench, MAX_INSPECTIONS)
        with pytest.raises(Overloaded) as refused:
            await bench.inspection.attention(request_of({"prompt": "a", "layer": 0}))
        assert refused.value.status == 429
        assert refused.value.headers()["retry-after"] == "1"
        assert bench.engine_client.num_queries == MAX_INSPECTIONS
        bench.engine_client.fail_all(ApiError("enough"))
        assert all(isinstance(ending, ApiError) for ending in await asyncio.gather(*tasks, return_exceptions=True))
        assert bench.engine_client.num_queries == 0

    asyncio.run(crowd())


def test_a_disconnect_cancels_the_attention_query(bench: Bench) -> None:
    async def leave() -> None:
        (task,) = await waiting(bench, 1, leaves=True)
        with pytest.raises(ClientGone):
            await task

    asyncio.run(leave())
    look, cancel = bench.sent
    assert isinstance(look, AttentionQuery)
    assert cancel == Cancel(uid=look.uid)
    assert bench.counts == [1, 0]


def answer_all(bench: Bench) -> None:
    """Send the worker's results of all queries."""
    looks = [command for command in bench.sent if isinstance(command, AttentionQuery)]
    bench.engine_client.receive(
        [AttentionResult(uid=k.uid, weights=even_weights(k), compute_seconds=0.0) for k in looks]
    )


def test_an_attention_query_survives_the_death_of_the_worker(bench: Bench) -> None:
    async def die() -> None:
        tasks = await waiting(bench, 2)
        bench.engine_client.receive(
            [AttentionResult(uid=bench.sent[1].uid, weights=None, compute_seconds=0.0), make_hello(epoch=1)]
        )
        first, _, again = bench.sent
        assert isinstance(first, AttentionQuery)
        assert again == msgspec.structs.replace(first, attempt=1), "the one without an answer"
        answer_all(bench)
        assert (await tasks[0]).status_code == 200
        with pytest.raises(EngineFailed, match="the engine failed"):
            await tasks[1]

    asyncio.run(die())
    assert bench.engine_client.num_queries == 0


def test_an_attention_query_over_the_queue_time_limit_is_a_408(bench: Bench) -> None:
    async def wait() -> None:
        began, running = await waiting(bench, 2)
        bench.engine_client.receive([Started(uid=bench.sent[1].uid, attempt=0)])
        bench.engine_client.expire(time.monotonic() + 59.0)
        await asyncio.sleep(0)
        assert not began.done()
        bench.engine_client.expire(time.monotonic() + 61.0)
        with pytest.raises(QueueTimeout, match="did not start within its timeout of 60 s"):
            await began
        assert not running.done(), "the worker computes it"
        bench.engine_client.workers[0].is_stalled = True
        bench.engine_client.expire(time.monotonic() + 61.0)
        with pytest.raises(QueueTimeout, match="did not finish within its timeout of 60 s"):
            await running

    asyncio.run(wait())
    assert [type(command) for command in bench.sent] == [AttentionQuery, AttentionQuery, Cancel, Cancel]


def test_results_of_unknown_attention_queries_are_ignored(bench: Bench) -> None:
    delta = make_delta("a", ids=(1,), text="x")
    late = AttentionResult(uid="unknown", weights=None, compute_seconds=0.0)
    bench.engine_client.receive([late, delta])
    assert bench.engine_client.num_queries == 0
