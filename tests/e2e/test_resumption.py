"""Lost connections: a client resumes its stream by event id, and a retry by key gets the response of the first try."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.process import NO_TLS, PATIENCE_SECONDS, Service, serving, wait_until

pytestmark = pytest.mark.slow

PROMPT = "once upon a time"
LENGTH = 300


@pytest.fixture(scope="module")
def service(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(long_checkpoint, tmp_path_factory.mktemp("service"), "--resume-seconds", "3600") as running:
        yield running


def _fields(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 1.0, "seed": 3, "ignore_eos": True, **more}


def _events(response: httpx.Response, limit: int | None = None) -> list[tuple[str, str]]:
    """Return (id, data) of the first `limit` events of a stream; of all events if `limit` is None."""
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


def _settled(service: Service, since: float) -> float:
    """Wait until a completion since the count `since` is counted. Return the number of all generated tokens."""
    wait_until(
        lambda: _generated(service) >= since + LENGTH and not service.metric("llm_num_requests_running"),
        what="the tokens to be counted",
    )
    return _generated(service)


def test_a_resumed_stream_repeats_and_loses_no_token(service: Service) -> None:
    since = _generated(service)
    whole = service.text(**_fields())
    before = _settled(service, since)
    url, headers = service.url + "/v1/completions", {"Accept": "text/event-stream"}
    with httpx.stream(
        "POST", url, json=_fields(stream=True), headers=headers, timeout=PATIENCE_SECONDS, verify=NO_TLS
    ) as response:
        first = _events(response, limit=10)
    last_id = first[-1][0]
    # The first resumption repeats the body, as an EventSource does. The second has no body.
    with httpx.stream(
        "POST", url, json=_fields(stream=True), headers={**headers, "Last-Event-ID": last_id}, timeout=PATIENCE_SECONDS
    ) as response:
        second = _events(response, limit=20)
    with httpx.stream(
        "POST", url, headers={"Last-Event-ID": second[-1][0]}, timeout=PATIENCE_SECONDS, verify=NO_TLS
    ) as response:
        assert response.headers["idempotent-replayed"] == "true"
        third = _events(response)
    events = first + second + third
    assert events[-1][1] == "[DONE]"
    assert _text(events) == whole
    numbers = [int(event_id.partition("/")[2]) for event_id, _ in events]
    assert numbers == list(range(len(events)))
    assert _settled(service, before) - before == LENGTH
    assert service.metric("llm_requests_resumed_total", by="event_id") == 2


def test_a_stream_without_an_accept_header_has_no_ids_and_a_disconnect_cancels_it(service: Service) -> None:
    cancelled, url = service.metric("llm_requests_cancelled_total"), service.url + "/v1/completions"
    body = _fields(stream=True, max_tokens=8000)
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_SECONDS, verify=NO_TLS) as response:
        assert {event_id for event_id, _ in _events(response, limit=3)} == {""}
    wait_until(lambda: service.metric("llm_requests_cancelled_total") == cancelled + 1, what="the stream's end")
    wait_until(lambda: not service.metric("llm_num_requests_running"), what="an idle engine")


def test_a_retry_by_key_gets_the_response_that_is_being_generated(service: Service) -> None:
    """The connection of the first try is lost before a byte of its response arrives."""
    since = _generated(service)
    whole = service.text(**_fields())
    before = _settled(service, since)
    key = {"idempotency-key": "one"}
    with service.asking(headers=key, **_fields()):
        wait_until(lambda: _generated(service) > before, what="the first token")
    body, url = json.dumps(_fields()), service.url + "/v1/completions"
    answer = httpx.post(url, content=body, headers=key, timeout=PATIENCE_SECONDS, verify=NO_TLS)
    assert answer.json()["choices"][0]["text"] == whole
    assert _settled(service, before) - before == LENGTH
    assert service.metric("llm_requests_resumed_total", by="key") == 1
