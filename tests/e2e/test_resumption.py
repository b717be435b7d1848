"""A connection is lost, and nothing else: the stream goes on, the retry gets the answer that was being made."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.process import Service, serving, wait_until

pytestmark = pytest.mark.slow

PROMPT = "once upon a time"
LENGTH = 300


@pytest.fixture(scope="module")
def service(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(long_checkpoint, tmp_path_factory.mktemp("service"), "--resume-seconds", "5") as running:
        yield running


def _fields(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 1.0, "seed": 3, "ignore_eos": True, **more}


def _events(response: httpx.Response, limit: int | None = None) -> list[tuple[str, str]]:
    """Ids and data of a stream's events, up to so many."""
    events, event_id = [], ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            events.append((event_id, line.removeprefix("data: ")))
            if len(events) == limit:
                break
    return events


def _text(events: list[tuple[str, str]]) -> str:
    return "".join(json.loads(data)["choices"][0]["text"] for _, data in events if data != "[DONE]")


def _generated(service: Service) -> float:
    return service.metric("llm_generation_tokens_total")


def test_a_stream_that_is_cut_and_taken_up_again_says_every_token_once(service: Service) -> None:
    whole = service.text(**_fields())
    before = _generated(service)
    url, headers = service.url + "/v1/completions", {"Accept": "text/event-stream"}
    with httpx.stream("POST", url, json=_fields(stream=True), headers=headers, timeout=60) as response:
        first = _events(response, limit=10)
    last_id = first[-1][0]
    # The body again, as an event source sends it, and then none.
    with httpx.stream(
        "POST", url, json=_fields(stream=True), headers={**headers, "Last-Event-ID": last_id}, timeout=60
    ) as response:
        second = _events(response, limit=20)
    with httpx.stream("POST", url, headers={"Last-Event-ID": second[-1][0]}, timeout=60) as response:
        assert response.headers["idempotent-replayed"] == "true"
        third = _events(response)
    events = first + second + third
    assert events[-1][1] == "[DONE]"
    assert _text(events) == whole
    numbers = [int(event_id.partition("/")[2]) for event_id, _ in events]
    assert numbers == list(range(len(events)))
    assert _generated(service) - before == LENGTH
    assert service.metric("llm_requests_resumed_total", by="event_id") == 2


def test_without_a_sign_that_ids_are_read_there_are_none_and_leaving_is_the_end(service: Service) -> None:
    with httpx.stream("POST", service.url + "/v1/completions", json=_fields(stream=True), timeout=60) as response:
        assert {event_id for event_id, _ in _events(response, limit=3)} == {""}
    wait_until(lambda: not service.metric("llm_num_requests_running"), what="the stream's end")


def test_what_nobody_comes_back_for_is_cancelled(service: Service) -> None:
    cancelled = service.metric("llm_requests_cancelled_total")
    fields = _fields(stream=True, max_tokens=8000)
    with httpx.stream(
        "POST", service.url + "/v1/completions", json=fields, headers={"Idempotency-Key": "gone"}, timeout=60
    ) as response:
        (event_id, _), *_ = _events(response, limit=1)
    wait_until(lambda: service.metric("llm_requests_cancelled_total") == cancelled + 1, what="nobody to come back")
    gone = httpx.post(service.url + "/v1/completions", headers={"Last-Event-ID": event_id}, timeout=60)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "answer_gone")


@contextmanager
def _cutting_proxy(service: Service, num_cuts: int) -> Iterator[str]:
    """A proxy that closes its first connections when the request is being answered, and before the answer is there."""
    before = _generated(service)
    host, port = service.url.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))
    cuts = iter([True] * num_cuts)

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with closing(source), closing(sink):
            try:
                while data := source.recv(65536):
                    sink.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            upstream = socket.create_connection((host, int(port)))
            threading.Thread(target=carry, args=(client, upstream), daemon=True).start()
            if next(cuts, False):
                wait_until(lambda: _generated(service) > before, what="the answer to begin")
                client.shutdown(socket.SHUT_RDWR)  # which ends what is carried, and closes both
                continue
            threading.Thread(target=carry, args=(upstream, client), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with closing(listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def test_the_retries_of_an_sdk_get_the_answer_that_is_being_made(service: Service) -> None:
    whole = service.text(**_fields())
    before = _generated(service)
    with (
        _cutting_proxy(service, num_cuts=2) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=2) as client,
    ):
        answer = client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=LENGTH,
            temperature=1.0,
            seed=3,
            extra_body={"ignore_eos": True},
            extra_headers={"Idempotency-Key": "an-sdk"},
        )
    assert answer.choices[0].text == whole
    assert _generated(service) - before == LENGTH
    assert service.metric("llm_requests_resumed_total", by="key") >= 1
