"""Clients that close their sending side, and clients that disconnect, on one server."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import PATIENCE_SECONDS, Service, serving, wait_until

pytestmark = pytest.mark.slow

_SHORT: dict[str, Any] = {"prompt": "once", "max_tokens": 4, "ignore_eos": True, "seed": 1}
_CHAT = {"messages": [{"role": "user", "content": "once"}], "max_tokens": 4, "seed": 1}
_RUNNING = ("llm_num_requests_running", "llm_num_requests_waiting", "llm_kv_cache_usage_perc")


def post(path: str, body: dict[str, Any], version: str = "1.1") -> bytes:
    written = json.dumps(body).encode()
    return f"POST {path} HTTP/{version}\r\nhost: a\r\ncontent-length: {len(written)}\r\n\r\n".encode() + written


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode()


def connect(service: Service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2])), timeout=PATIENCE_SECONDS)


def half_closed(service: Service, sent: bytes) -> list[bytes]:
    """Send requests, close the sending side as `nc -N` does, and return all responses."""
    with connect(service) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        text = b""
        while piece := connection.recv(65536):
            text += piece
    first, *answers = text.split(b"HTTP/1.1 ")
    assert first == b""
    return answers


@pytest.fixture(scope="module")
def service(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving(long_checkpoint, tmp_path_factory.mktemp("half_close")) as running:
        yield running


@pytest.mark.parametrize(
    ("sent", "end"),
    [
        (post("/v1/completions", _SHORT), b"}"),
        (post("/v1/completions", _SHORT, version="1.0"), b"}"),
        (post("/v1/completions", {**_SHORT, "stream": True}), b"data: [DONE]\n\n\r\n0\r\n\r\n"),
        (post("/v1/completions", {**_SHORT, "stream": True}, version="1.0"), b"data: [DONE]\n\n"),
        (post("/v1/completions", {**_SHORT, "max_tokens": 500}), b"}"),
        (post("/v1/chat/completions", _CHAT), b"}"),
        (post("/v1/chat/completions", {**_CHAT, "stream": True}), b"data: [DONE]\n\n\r\n0\r\n\r\n"),
        (post("/v1/embeddings", {"input": "once"}), b"}"),
        (get("/v1/models"), b"}"),
        (get("/health"), b"}"),
        (get("/metrics"), b"\n"),
    ],
)
def test_a_half_closed_client_gets_its_whole_response(service: Service, sent: bytes, end: bytes) -> None:
    (answer,) = half_closed(service, sent)
    assert answer.startswith(b"200 ")
    assert answer.endswith(end)


def test_hundreds_of_pipelined_requests_are_answered_in_order(service: Service) -> None:
    sent = b"".join(
        get("/health") if number % 4 else post("/tokenize", {"prompt": "a" * number}) for number in range(400)
    )
    answers = half_closed(service, sent + post("/v1/completions", _SHORT) + get("/health"))
    assert all(answer.startswith(b"200 ") for answer in answers)
    bodies = [json.loads(answer.partition(b"\r\n\r\n")[2]) for answer in answers]
    kinds = ["count" if "count" in body else "choices" if "choices" in body else "status" for body in bodies]
    assert kinds == [*(["count", "status", "status", "status"] * 100), "choices", "status"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves_in_two_steps", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_disconnect_frees_the_blocks_of_the_request(
    service: Service, version: str, leaves_in_two_steps: bool, stream: bool
) -> None:
    cancelled = service.metric("llm_requests_cancelled_total")
    with connect(service) as connection:
        connection.sendall(post("/v1/completions", {**_SHORT, "max_tokens": 8000, "stream": stream}, version))
        if leaves_in_two_steps:
            connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: service.metric("llm_num_requests_running") == 1, what="the request to be computed")
    wait_until(lambda: service.metric("llm_requests_cancelled_total") == cancelled + 1, what="the cancellation")
    wait_until(lambda: sum(map(service.metric, _RUNNING)) == 0, what="an idle engine")
