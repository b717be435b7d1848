"""Discovery of a service with and without `/tokenize`."""

import urllib.error
from typing import Any

import pytest

from loadtest.client.sse_client import Target, discover
from loadtest.client.workload import WorkloadSpec, tales
from tests.loadtest.stub_server import MODEL, StubServer


def test_a_service_with_tokenize_gives_prompts_of_exact_length() -> None:
    with StubServer() as server:
        model, workload = discover(Target.parse(server.url), WorkloadSpec(prompt_tokens=100))
    assert (model, workload.spec.max_context_tokens) == (MODEL, 512)
    assert all(4 * 95 <= len(workload.request(index).prompt) <= 4 * 101 for index in range(50))


@pytest.mark.parametrize(
    ("answer", "chars_per_token"),
    [
        (urllib.error.HTTPError("", 404, "", {}, None), 4),  # type: ignore[arg-type]
        ({"count": len(tales()) // 2}, 2),
        ({"count": len(tales()) // 2, "token_strs": None}, 2),
        ({"count": len(tales()) // 2, "token_strs": ["not", "the", "text"]}, 2),
    ],
)
def test_a_service_without_tokenize_gives_prompts_by_characters(
    monkeypatch: pytest.MonkeyPatch, answer: Any, chars_per_token: int
) -> None:
    def fetch(target: Target, path: str, payload: Any = None) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "theirs"}]}
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Target, "fetch_json", fetch)
    model, workload = discover(Target("127.0.0.1", 1), WorkloadSpec(prompt_tokens=100, max_context_tokens=999))
    assert (model, workload.spec.max_context_tokens) == ("theirs", 999)
    assert 95 * chars_per_token - 20 <= len(workload.request(0).prompt) <= 100 * chars_per_token
    assert (
        len(discover(Target("127.0.0.1", 1), WorkloadSpec(prompt_tokens=999))[1].request(0).prompt)
        < 200 * chars_per_token
    )


def test_the_pieces_and_the_context_of_llama_cpp_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(target: Target, path: str, payload: Any = None) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "theirs", "owned_by": "llamacpp", "meta": {"n_ctx": 768, "n_ctx_train": 2048}}]}
        text = payload["content"]
        return {"tokens": [{"id": at, "piece": text[at : at + 3]} for at in range(0, len(text), 3)]}

    monkeypatch.setattr(Target, "fetch_json", fetch)
    _, workload = discover(Target("127.0.0.1", 1), WorkloadSpec(prompt_tokens=100))
    assert (workload.spec.max_context_tokens, workload.passages.overshoot) == (768, 1.0)
    assert 3 * 95 <= len(workload.request(0).prompt) <= 3 * 101


def test_an_error_status_is_an_os_error() -> None:
    with StubServer() as server, pytest.raises(OSError, match="404"):
        Target.parse(server.url).fetch_json("/nowhere")
