"""Route `/v1/embeddings` with an engine that responds at once."""

import asyncio
import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from starlette.testclient import TestClient
from starlette.types import Message

from service.api.app import Frontend
from service.api.embeddings import EmbeddingBody, group_choices
from service.config.settings import ServeSettings
from service.ipc.messages import Pooling, encode_events
from service.ipc.shared_state import Lifecycle, Phase
from service.metrics.recorder import Metrics
from service.protocol.embeddings import EmbeddingRequest, write_vectors
from service.protocol.errors import Draining, Overloaded
from service.requests.inflight import InflightRequest
from tests.service.echo import WIDTH, EchoChannel, vector
from tests.service.sequences import make_choice, make_hello, make_request
from tests.tiny_model import EOS

ROUTE = "/v1/embeddings"


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post(ROUTE, json=fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def vectors(body: dict[str, Any]) -> NDArray[np.float32]:
    assert [each["index"] for each in body["data"]] == list(range(len(body["data"])))
    assert {each["object"] for each in body["data"]} == {"embedding"}
    return np.array([each["embedding"] for each in body["data"]], dtype=np.float32)


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        ("abc", [[97, 98, 99]]),
        (["abc", "d"], [[97, 98, 99], [100]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_each_text_has_its_vector_in_request_order(
    client: TestClient, queue: EchoChannel, asked: Any, ids: list[Any]
) -> None:
    body = ask(client, input=asked, model="tiny", user="me")
    np.testing.assert_allclose(vectors(body), [vector(each) for each in ids], atol=1e-8)
    count = sum(map(len, ids))
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (body["object"], body["model"]) == ("list", "tiny")
    for submit, wanted in zip(queue.submits, ids, strict=True):
        assert list(submit.prompt_token_ids) == wanted
        assert (submit.pooling, submit.params.max_tokens) == (Pooling.MEAN, 0)


def test_base64_vectors_equal_float_vectors(client: TestClient) -> None:
    numbers = vectors(ask(client, input=["abc", "d"], encoding_format="float"))
    assert (vectors(ask(client, input=["abc", "d"], encoding_format=None)) == numbers).all()
    told = ask(client, input=["abc", "d"], encoding_format="base64")["data"]
    decoded = [np.frombuffer(base64.b64decode(each["embedding"]), dtype="<f4") for each in told]
    np.testing.assert_allclose(decoded, numbers, atol=1e-8)


def test_dimensions_truncates_vectors_and_rescales_them(client: TestClient) -> None:
    whole = vectors(ask(client, input="abc"))
    assert whole.shape == (1, WIDTH)
    for encoding in ("float", "base64"):
        body = ask(client, input="abc", dimensions=5, encoding_format=encoding)
        told = body["data"][0]["embedding"]
        cut = np.array(told) if encoding == "float" else np.frombuffer(base64.b64decode(told), dtype="<f4")
        np.testing.assert_allclose(cut, whole[0, :5] / np.linalg.norm(whole[0, :5]), atol=1e-7)
    assert (vectors(ask(client, input="abc", dimensions=WIDTH)) == whole).all()


def test_special_tokens_in_embedded_texts_are_parsed_unless_parse_special_is_false(client: TestClient) -> None:
    for fields, count in (({}, 2), ({"parse_special": False}, 1 + len(EOS))):
        assert ask(client, input=f"a{EOS}", **fields)["usage"]["prompt_tokens"] == count


def test_truncate_prompt_tokens_cuts_embedded_texts(client: TestClient, queue: EchoChannel) -> None:
    for kept, length in ((3, 3), (-1, 256), (256, 256)):
        body = ask(client, input=["a" * 250 + "xyz" * 20], truncate_prompt_tokens=kept)
        ids = queue.submits[-1].prompt_token_ids
        assert (len(ids), bytes(ids[-3:])) == (length, b"xyz")
        assert body["usage"]["prompt_tokens"] == length


@pytest.mark.parametrize(
    ("fields", "status", "param", "said"),
    [
        ({}, 400, "input", "input is required"),
        ({"input": ""}, 400, "input", "must not be empty"),
        ({"input": []}, 400, "input", "must not be empty"),
        ({"input": ["a", ""]}, 400, "input", "must not be empty"),
        ({"input": [[1], []]}, 400, "input", "must not be empty"),
        ({"input": None}, 400, "input", "input must be a string, a list of token ids, or"),
        ({"input": [1, "a"]}, 400, "input", "input must be a string, a list of token ids, or"),
        ({"input": ["a"] * 4097}, 400, "input", "up to 4096"),
        ({"input": [9, 274]}, 400, "input", "token id 274 is out of vocabulary"),
        (
            {"input": ["b", "a" * 257]},
            400,
            "input",
            "context length is 256 tokens, but the prompt has 257 tokens; shorten",
        ),
        ({"input": "a" * 1_000_000}, 400, "input", "but the prompt has at least"),
        ({"input": "a", "model": "other"}, 404, "model", "does not exist"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions", "must be greater than or equal to 1"),
        ({"input": "a", "dimensions": 33}, 400, "dimensions", "dimensions=33 is over the 32 dimensions of this model"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "must be 'float' or 'base64'"),
        ({"input": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens", "a whole number from 1, or -1"),
        ({"input": "a", "truncate_prompt_tokens": 257}, 400, "truncate_prompt_tokens", "over the 256 tokens"),
        ({"input": "a", "temperature": 1}, 400, "temperature", "unknown field: temperature"),
    ],
)
def test_an_invalid_embeddings_request_names_the_field(
    client: TestClient, queue: EchoChannel, fields: dict[str, Any], status: int, param: str, said: str
) -> None:
    response = client.post(ROUTE, json=fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert said in error["message"]
    assert queue.submits == []


def test_an_embeddings_request_of_many_texts_fits_a_small_server(client: TestClient, queue: EchoChannel) -> None:
    """The server holds 4 sequences, and a request submits its texts in groups of 2."""
    texts = [f"{number}" for number in range(50)]
    body = ask(client, input=texts)
    np.testing.assert_allclose(vectors(body), [vector(list(text.encode())) for text in texts], atol=1e-8)
    assert [bytes(submit.prompt_token_ids).decode() for submit in queue.submits] == texts
    finished = 'llm_request_success_total{engine="0",finished_reason="length",model_name="tiny"} 50.0'
    assert finished in client.get("/metrics").text


def test_groups_have_limited_choices_and_tokens() -> None:
    lengths = [5, 5, 9000, 9000, 20_000, 5]
    choices = [make_choice(str(n), index=n, prompt=(1,) * length) for n, length in enumerate(lengths)]
    assert [[choice.index for choice in group] for group in group_choices(choices, 2)] == [[0, 1], [2], [3], [4], [5]]
    assert [[choice.index for choice in group] for group in group_choices(choices[:3], 8)] == [[0, 1, 2]]


def test_full_and_draining_servers_reject_embeddings(
    client: TestClient, frontend: Frontend, lifecycle: Lifecycle, queue: EchoChannel
) -> None:
    queue.answers = False
    for uid in "abcd":
        frontend.context.engine_client.submit(make_request(make_choice(uid)))
    assert client.post(ROUTE, json={"input": "a"}).json()["error"]["code"] == "queue_full"
    lifecycle.enter(Phase.DRAINING)
    assert client.post(ROUTE, json={"input": "a"}).json()["error"]["code"] == "draining"


def test_a_retry_with_the_same_idempotency_key_is_not_computed_again(client: TestClient, queue: EchoChannel) -> None:
    headers = {"Idempotency-Key": "k"}
    first, second = (client.post(ROUTE, json={"input": "a"}, headers=headers) for _ in range(2))
    assert first.content == second.content
    assert second.headers["idempotent-replayed"] == "true"
    other = client.post(ROUTE, json={"input": "b"}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reused")


def group(number: int) -> InflightRequest:
    choice = make_choice(str(number), index=number, prompt=(97 + number,), max_tokens=0)
    choice.submit = msgspec.structs.replace(choice.submit, pooling=Pooling.MEAN)
    return make_request(choice)


class Served:
    """An `EmbeddingBody` of two groups of one text each, advanced by the test."""

    def __init__(self, frontend: Frontend, metrics: Metrics, *, num_refusals: int) -> None:
        self.engine_client = frontend.context.engine_client
        self.num_refusals = num_refusals
        self.groups = [group(0), group(1)]
        self.engine_client.submit(self.groups[0])
        asked = EmbeddingRequest(input=["a", "b"])
        context: Any = SimpleNamespace(
            engine_client=SimpleNamespace(submit=self.submit, finish=self.engine_client.finish),
            processor=frontend.context.processor,
            metrics=metrics,
        )
        self.body = EmbeddingBody(self.groups, asked, context)
        self.sent: list[Message] = []
        self.left = asyncio.Event()

    def submit(self, live: InflightRequest) -> None:
        assert self.engine_client.num_requests == 1, "what goes on is never seen as finished"
        self.num_refusals -= 1
        if self.num_refusals >= 0:
            raise Overloaded("full", retry_after_seconds=0.001)
        self.engine_client.submit(live)

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def answer(self) -> None:
        await asyncio.wait_for(self.body({"type": "http"}, self.receive, self.send), 60)


def test_later_groups_of_texts_wait_for_capacity(frontend: Frontend, metrics: Metrics) -> None:
    async def run() -> Served:
        served = Served(frontend, metrics, num_refusals=3)
        await served.answer()
        return served

    served = asyncio.run(run())
    start, body = served.sent
    assert start["status"] == 200
    told = json.loads(body["body"])
    np.testing.assert_allclose(vectors(told), [vector([97]), vector([98])], atol=1e-8)
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert served.engine_client.num_requests == 0


@pytest.mark.parametrize("answers", [True, False])
def test_a_disconnect_ends_an_embeddings_request(
    frontend: Frontend, metrics: Metrics, queue: EchoChannel, answers: bool
) -> None:
    """The client disconnects during the computation, or while a group waits for capacity."""

    async def run() -> Served:
        queue.answers = answers
        served = Served(frontend, metrics, num_refusals=1_000_000)
        task = asyncio.create_task(served.answer())
        while answers and served.num_refusals > 999_990:
            await asyncio.sleep(0)
        served.left.set()
        await task
        return served

    served = asyncio.run(run())
    assert served.sent == []
    assert served.engine_client.num_requests == 0
    assert queue.cancelled == ([] if answers else ["0"])
    cancelled = 'llm_requests_cancelled_total{engine="0",model_name="tiny",phase="%s"} 1.0'
    assert cancelled % ("running" if answers else "waiting") in metrics.render()[0].decode()


def test_a_shutdown_ends_an_embeddings_request_that_waits_for_capacity(frontend: Frontend, metrics: Metrics) -> None:
    async def run() -> Served:
        served = Served(frontend, metrics, num_refusals=1_000_000)
        task = asyncio.create_task(served.answer())
        while served.num_refusals > 999_990:
            await asyncio.sleep(0)
        served.engine_client.fail_all(Draining("the server is shutting down", retry_after_seconds=1.0))
        with pytest.raises(Draining):
            await task
        return served

    served = asyncio.run(run())
    assert served.sent == []
    assert served.engine_client.num_requests == 0
    assert served.groups[1].terms.is_retry


def test_an_engine_failure_fails_an_embeddings_request(
    client: TestClient, frontend: Frontend, queue: EchoChannel
) -> None:
    queue.failure = "the engine failed"
    error = client.post(ROUTE, json={"input": "a"})
    assert (error.status_code, error.json()["error"]["code"]) == (500, "engine_failed")
    assert frontend.context.engine_client.num_requests == 0


def test_embeddings_survive_the_death_of_the_worker(frontend: Frontend, metrics: Metrics, queue: EchoChannel) -> None:
    async def run() -> Served:
        queue.answers = False
        served = Served(frontend, metrics, num_refusals=0)
        task = asyncio.create_task(served.answer())
        await asyncio.sleep(0)
        queue.answers = True
        frontend.receive(encode_events([make_hello(1)]))
        await task
        return served

    served = asyncio.run(run())
    assert served.sent[0]["status"] == 200
    assert [submit.attempt for submit in queue.submits] == [0, 1, 0]
    assert {submit.pooling for submit in queue.submits} == {Pooling.MEAN}


class TestLastTokenPooling:
    """Embeddings with `--embedding-pooling last`."""

    @pytest.fixture
    def settings(self, tiny_checkpoint: Path) -> ServeSettings:
        return ServeSettings(checkpoint=tiny_checkpoint, embedding_pooling="last")

    def test_the_engine_gets_the_pooling_setting(self, client: TestClient, queue: EchoChannel) -> None:
        ask(client, input="abc")
        assert queue.submits[0].pooling is Pooling.LAST


def test_vectors_are_rounded_to_9_decimals_within_float32_precision() -> None:
    many = [vector([number]).tobytes() for number in range(300)]
    for row, told in zip(many, write_vectors(many, dimensions=None, as_text="float"), strict=True):
        assert isinstance(told, list)
        np.testing.assert_allclose(told, np.frombuffer(row, dtype=np.float32), atol=6e-10)
        assert max(len(str(number)) for number in told if abs(number) > 1e-3) <= 12
