"""Requests and responses of `vllm bench serve`, by its source (vllm 0.33.0, benchmarks/lib/endpoint_request_func.py).

The program itself is not run: docs/clients.md says why. These tests send the same requests and check the responses. An
SSE message ends with an empty line and is a comment, JSON or [DONE]. A message with choices has text. The last message
has usage and no choices. An error has a reason phrase, the only part of an error that the program prints.
"""

import json
from typing import Any

import httpx
import pytest

from tests.clients.environments import MODEL
from tests.clients.test_libraries import PROMPT
from tests.e2e.process import Service

NUM_TOKENS = 8
COMMON = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
COMPLETION = {"prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": NUM_TOKENS, "logprobs": None, "temperature": 0}
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
CHAT = {"messages": MESSAGES, "max_completion_tokens": NUM_TOKENS, "temperature": 0}


def messages(service: Service, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the JSON messages of a stream, and check that [DONE] follows them."""
    with httpx.stream("POST", service.url + path, json=COMMON | fields, timeout=60) as response:
        assert response.status_code == 200
        found = [message.strip() for message in "".join(response.iter_text()).split("\n\n")]
    *data, done = [message for message in found if message and not message.startswith(":")]
    assert done == "data: [DONE]"
    return [json.loads(message.removeprefix("data: ")) for message in data]


def test_completion_stream_has_the_format_of_vllm_bench_serve(service: Service) -> None:
    *chunks, closing = messages(service, "/v1/completions", **COMPLETION)
    assert all(chunk["choices"] for chunk in chunks)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == service.text(PROMPT, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    assert closing["choices"] == []
    assert closing["usage"]["completion_tokens"] == NUM_TOKENS
    assert closing["usage"]["prompt_tokens"] == service.post("/tokenize", prompt=PROMPT).json()["count"]


def test_chat_stream_has_the_format_of_vllm_bench_serve(service: Service) -> None:
    *chunks, closing = messages(service, "/v1/chat/completions", **CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "role" in deltas[0], "the opening message differs from those with tokens by its role"
    assert not [delta for delta in deltas[1:] if "role" in delta]
    whole = service.post("/v1/chat/completions", **CHAT, ignore_eos=True).json()
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert closing["choices"] == []
    assert closing["usage"]["completion_tokens"] == NUM_TOKENS


@pytest.mark.parametrize(
    ("fields", "reason"), [({"model": "no-such-model"}, "Not Found"), ({"max_tokens": -1}, "Bad Request")]
)
def test_an_error_response_has_a_reason_phrase(service: Service, fields: dict[str, Any], reason: str) -> None:
    answer = httpx.post(service.url + "/v1/completions", json=COMMON | COMPLETION | fields, timeout=60)
    assert answer.reason_phrase == reason
    assert answer.is_client_error
