"""Discovery of a service with and without `/tokenize`."""

import urllib.error
from typing import Any

import pytest

from loadtest.client.sse_client import Target, discover
from loadtest.client.workload import tales
from tests.loadtest.stub_server import MODEL, StubServer


def test_a_service_with_tokenize_gives_prompts_of_exact_length() -> None:
    with StubServer() as server:
        service = discover(Target.parse(server.url))
    assert (service.model, service.max_context_tokens) == (MODEL, 512)
    assert service.passages.overshoot == 1.0
    assert all(4 * 95 <= len(service.passages.cut(start, 100)) <= 4 * 101 for start in range(50))


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
    service = discover(Target("127.0.0.1", 1))
    assert (service.model, service.max_context_tokens) == ("theirs", None)
    assert service.passages.overshoot > 1.0
    assert 95 * chars_per_token - 20 <= len(service.passages.cut(0, 100)) <= 101 * chars_per_token


def test_an_error_status_is_an_os_error() -> None:
    with StubServer() as server, pytest.raises(OSError, match="404"):
        Target.parse(server.url).fetch_json("/nowhere")
