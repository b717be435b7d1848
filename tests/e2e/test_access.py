"""API keys, CORS, the limit on request heads, and embeddings, on one server."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray

from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionMetadata
from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.nn.transformer import Transformer
from model.tokenizer.files import load_tokenizer
from service.http.connection import MAX_HEAD_BYTES
from tests.e2e.process import NO_TLS, Service, serving, wait_until
from tests.hostile.raw import exchange

pytestmark = pytest.mark.slow

ALICE, BOB = "sk-alice-0123456789abcdef", "sk-bob-0123456789abcdef"
PAGE = "https://page.example"
ALIAS = "text-embedding-tiny"
TEXTS = ["once upon a time", "the theatre 😀", "a", " in the hat" * 20, "an ending\n\n"]


@pytest.fixture(scope="module")
def service(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("access")
    keys = directory / "keys"
    keys.write_text(f"# who may\nalice: {ALICE}\nbob: {BOB}\n")
    keys.chmod(0o600)
    flags = ("--api-keys-file", str(keys), "--cors-origins", PAGE, "--model-alias", ALIAS, "--log-level", "debug")
    with serving(tiny_checkpoint, directory, *flags, "--max-batched-tokens", "64", "--max-prompts", "2000") as running:
        yield running


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> Transformer:
    manifest, backend = read_manifest(tiny_checkpoint), ATTENTION_BACKENDS["eager"]
    return load_model(manifest, device="cpu", dtype=torch.float32, attention=backend)


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.url + "/v1", api_key=BOB, max_retries=0) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def embed(client: openai.OpenAI, texts: list[str]) -> NDArray[np.float64]:
    return np.array([each.embedding for each in client.embeddings.create(model=ALIAS, input=texts).data])


def test_requests_without_a_valid_key_get_401(service: Service, client: openai.OpenAI) -> None:
    refused = service.post(prompt="once")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["code"] == "invalid_api_key"
    with (
        openai.OpenAI(base_url=service.url + "/v1", api_key=BOB + "x", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    assert [card.id for card in client.models.list()] == ["tiny", ALIAS]
    assert client.completions.create(model=ALIAS, prompt="once", max_tokens=3).model == "tiny"
    for path in ("/health", "/ready", "/metrics", "/playground", "/openapi.json"):
        assert service.get(path).status_code == 200
    assert service.get("/version").status_code == 401
    assert service.metric("llm_request_failures_total", status="401") >= 3


def test_keys_appear_in_no_output(service: Service, client: openai.OpenAI) -> None:
    client.models.list()
    wait_until(lambda: "GET /v1/models: API key bob" in service.log.read_text(), what="the log line")
    told = service.log.read_text() + service.printed.read_text()
    told += " ".join(word for each in service.children for word in each.cmdline())
    assert "sk-" not in told
    assert ["api_keys", "alice,", "bob"] in [line.split() for line in service.printed.read_text().splitlines()]


def test_only_configured_origins_pass_cors(service: Service) -> None:
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    url = service.url + "/v1/completions"
    allowed = httpx.options(url, headers={**asking, "origin": PAGE}, timeout=300)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
    stranger = httpx.options(url, headers={**asking, "origin": "https://b.c"}, timeout=300)
    assert "access-control-allow-origin" not in stranger.headers
    body = {"prompt": "once", "max_tokens": 3, "stream": True}
    streamed = httpx.post(url, json=body, headers={**bearer(ALICE), "origin": PAGE}, timeout=300, verify=NO_TLS)
    assert streamed.headers["access-control-allow-origin"] == PAGE
    assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "fields",
    [b"a: b\r\n" * 101 + b"\r\n", b"a: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n", b"a: " + b"b" * MAX_HEAD_BYTES],
)
def test_a_request_head_is_bounded(service: Service, fields: bytes) -> None:
    """The last head is not complete."""
    answer = exchange(service, b"GET /health HTTP/1.1\r\nhost: a\r\n" + fields)
    assert answer.statuses == [431]
    assert answer.error["code"] == "head_too_large"


def test_embeddings_are_those_of_the_model(
    service: Service, client: openai.OpenAI, model: Transformer, tiny_checkpoint: Path
) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    answer = client.embeddings.create(model=ALIAS, input=TEXTS)
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    for each, token_ids in zip(answer.data, ids, strict=True):
        with torch.inference_mode():
            metadata = AttentionMetadata.uncached((len(token_ids),))
            mean_E = model.final_norm(model.hidden(torch.tensor(token_ids), metadata, None)).mean(0)
        np.testing.assert_allclose(each.embedding, (mean_E / mean_E.norm()).numpy(), atol=1e-5)
    floats = client.embeddings.create(model=ALIAS, input=ids, encoding_format="float", dimensions=8)
    for cut, each in zip(floats.data, answer.data, strict=True):
        whole = np.array(each.embedding[:8])
        np.testing.assert_allclose(cut.embedding, whole / np.linalg.norm(whole), atol=1e-5)


def test_embeddings_do_not_depend_on_concurrent_requests(service: Service, client: openai.OpenAI) -> None:
    alone = np.concatenate([embed(client, [text]) for text in TEXTS])
    body = {"prompt": "once", "max_tokens": 100, "seed": 1, "ignore_eos": True}

    def complete(_: int) -> str:
        text: str = httpx.post(
            service.url + "/v1/completions", json=body, headers=bearer(ALICE), timeout=300, verify=NO_TLS
        ).text
        return str(json.loads(text)["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(complete, number) for number in range(4)]
        crowds = [pool.submit(embed, client, [*TEXTS, f"and {number} more"] * 20) for number in range(4)]
        assert len({text.result() for text in texts}) == 1
        for crowd in crowds:
            told = crowd.result().reshape(20, len(TEXTS) + 1, -1)[:, :-1]
            np.testing.assert_allclose(told, np.broadcast_to(alone, told.shape), atol=1e-5)


def test_a_disconnect_cancels_an_embeddings_request(service: Service) -> None:
    worker = service.worker
    worker.suspend()  # so that the request is not computed before its client disconnects
    try:
        with service.asking("/v1/embeddings", bearer(ALICE), input=["an ending " * 20] * 2000):
            wait_until(lambda: service.metric("llm_api_requests") == 1, what="the request to be taken")
    finally:
        worker.resume()
    wait_until(lambda: service.metric("llm_requests_cancelled_total") >= 1, what="the cancellation")
    running = ("llm_num_requests_running", "llm_num_requests_waiting", "llm_kv_cache_usage_perc")
    wait_until(lambda: sum(map(service.metric, running)) == 0, what="an idle engine")
    over = httpx.post(
        service.url + "/v1/embeddings", json={"input": ["a"] * 2001}, headers=bearer(ALICE), timeout=300, verify=NO_TLS
    )
    assert (over.status_code, over.json()["error"]["param"]) == (400, "input")
