"""API keys, the prefix cache of each key, and embeddings, on one server."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
from tests.e2e.process import NO_TLS, Service, serving, wait_until

pytestmark = pytest.mark.slow

ALICE, BOB = "sk-alice-0123456789abcdef", "sk-bob-0123456789abcdef"
ALIAS = "text-embedding-tiny"
TEXTS = ["once upon a time", "the theatre 😀", "a", " in the hat" * 20, "an ending\n\n"]


@pytest.fixture(scope="module")
def service(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("access")
    keys = directory / "keys"
    keys.write_text(f"# who may\nalice: {ALICE}\nbob: {BOB}\n")
    keys.chmod(0o600)
    flags = ("--api-keys-file", str(keys), "--model-alias", ALIAS, "--block-size", "2")
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


def test_a_request_hits_only_prompts_of_its_own_key(service: Service) -> None:
    def num_cached(key: str, path: str, **fields: Any) -> int:
        body = {"max_tokens": 1, **fields}
        answer = httpx.post(service.url + path, json=body, headers=bearer(key), timeout=300, verify=NO_TLS)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    for path, subject in (
        ("/v1/completions", {"prompt": [1, 2, 3, 4, 5, 6, 7]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a wolf in the theatre"}]}),
    ):
        assert num_cached(ALICE, path, **subject) == 0
        num_own = num_cached(ALICE, path, **subject)
        assert num_own >= 6
        assert num_cached(BOB, path, **subject) == 0
        assert num_cached(BOB, path, **subject, cache_salt="alice") == 0
        assert num_cached(BOB, path, **subject) == num_own


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
