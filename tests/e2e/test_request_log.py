"""Request log and traces of a real server, with a client that disconnects and a worker that dies."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.collector import Collector, attributes, collecting
from tests.e2e.process import NO_TLS, PATIENCE_SECONDS, Service, serving, wait_until
from tests.tiny_model import save_tiny_checkpoint

pytestmark = pytest.mark.slow

KEY = "sk-alice-0123456789abcdef"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
LONG: dict[str, Any] = {"prompt": "once the", "max_tokens": 30_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def service(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Start a service with a context in which a completion takes seconds, so that a test can act meanwhile."""
    checkpoint = save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "longer", max_context_length=32_768)
    flags = ("--log-format", "json", "--otlp-endpoint", collector.url, "--max-waiting-requests", "0")
    variables = {"KVASIR_API_KEYS": f"alice: {KEY}", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    directory = tmp_path_factory.mktemp("log")
    with serving(checkpoint, directory, "--max-num-running", "1", *flags, **variables) as running:
        yield running


def post(service: Service, request_id: str, path: str = TEXT, key: str = KEY, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
    return httpx.post(service.url + path, json=fields, headers=headers, timeout=PATIENCE_SECONDS, verify=NO_TLS)


def lines(service: Service, **wanted: Any) -> list[dict[str, Any]]:
    """Return the request log's lines with these values. Check that the whole log is lines of JSON."""
    entries = [json.loads(line) for line in service.log.read_text().splitlines()]
    requests = [entry for entry in entries if entry["logger"] == "kvasir.request"]
    return [line for line in requests if all(line.get(name) == value for name, value in wanted.items())]


def line_of(service: Service, request_id: str) -> dict[str, Any]:
    """Wait for the line of a request, and return it."""
    wait_until(lambda: bool(lines(service, request_id=request_id)), what="the line of the request")
    (line,) = lines(service, request_id=request_id)
    return line


def spans_of(collector: Collector, request_id: str) -> list[Any]:
    return [span for span in collector.spans if attributes(span).get("kvasir.request_id") == request_id]


def test_each_request_has_one_line_with_its_outcome(service: Service) -> None:
    messages = [{"role": "user", "content": "once"}]
    assert post(service, "text", prompt="once", max_tokens=3).status_code == 200
    assert post(service, "chat", CHAT, messages=messages, max_tokens=3, stream=True).status_code == 200
    assert post(service, "bad", prompt=3).status_code == 400
    assert post(service, "unknown", "/v1/nope").status_code == 404
    assert post(service, "keyless", key="no", prompt="once").status_code == 401
    expected = {"text": (200, None), "chat": (200, None), "bad": (400, "invalid_request")}
    expected |= {"unknown": (404, "route_not_found"), "keyless": (401, "invalid_api_key")}
    for request_id, outcome in expected.items():
        line = line_of(service, request_id)
        assert (line["status"], line.get("error")) == outcome
        assert line["process"] == "kvasir-api"
    assert line_of(service, "text")["num_completion_tokens"] == 3
    assert line_of(service, "chat")["stream"] is True
    assert KEY not in service.log.read_text()
    assert "once" not in json.dumps(lines(service))
    assert service.printed.read_text() == ""  # the settings are a line of the log


def test_bytes_that_are_not_http_have_a_line(service: Service) -> None:
    with socket.create_connection(("127.0.0.1", int(service.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"GARBAGE\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    wait_until(lambda: bool(lines(service, message="incomplete request: 400")), what="the line")


def test_a_client_that_disconnects_and_a_full_server_have_a_line_each(service: Service) -> None:
    """A stream may end before the worker is suspended. The second request then waits in vain, and both are repeated."""
    for attempt in range(20):
        headers, worker = {"authorization": f"Bearer {KEY}", "x-request-id": f"gone-{attempt}"}, service.worker
        with httpx.stream(
            "POST", service.url + TEXT, json=LONG, headers=headers, timeout=PATIENCE_SECONDS, verify=NO_TLS
        ) as response:
            next(response.iter_lines())
            worker.suspend()
            status = post(service, f"full-{attempt}", prompt="once", timeout=0.5).status_code
        worker.resume()
        if status == 429:
            break
    assert status == 429
    line = line_of(service, f"gone-{attempt}")
    assert (line["status"], line["client_gone"], line["error"]) == (200, True, "client_closed_request")
    assert line["finish_reasons"] == [None]
    assert 1 <= line["num_completion_tokens"] < LONG["max_tokens"]
    assert line["total_seconds"] >= line["ttft_seconds"] > 0
    full = line_of(service, f"full-{attempt}")
    assert (full["status"], full["error"], full["client_gone"]) == (429, "queue_full", False)


def test_a_worker_that_dies_is_an_event_of_the_one_trace(service: Service, collector: Collector) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "survivor", "traceparent": f"00-{trace}-{parent}-01"}
    worker, asked = service.worker, {**LONG, "max_tokens": 2000}  # a second or more, for the kill of the worker
    with httpx.stream(
        "POST", service.url + TEXT, json=asked, headers=headers, timeout=PATIENCE_SECONDS, verify=NO_TLS
    ) as response:
        events = response.iter_lines()
        next(events)
        worker.kill()
        assert list(events)[-2:] == ["data: [DONE]", ""]
    line = line_of(service, "survivor")
    assert (line["num_worker_restarts"], line["num_completion_tokens"], line["client_gone"]) == (1, 2000, False)
    wait_until(lambda: bool(spans_of(collector, "survivor")), what="the span")
    (span,) = spans_of(collector, "survivor")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, parent)
    assert [event.name for event in span.events] == ["worker_restarted"]
    assert attributes(span.events[0]) == {"attempt": 1}
    assert span.start_time_unix_nano < span.events[0].time_unix_nano < span.end_time_unix_nano
    assert attributes(span)["gen_ai.usage.output_tokens"] == 2000
    children = [each for each in collector.spans if each.parent_span_id == span.span_id]
    assert sorted(child.name for child in children) == ["decode", "prefill", "queue"]
    assert all(span.start_time_unix_nano <= child.start_time_unix_nano for child in children)
    assert all(child.end_time_unix_nano <= span.end_time_unix_nano for child in children)
    assert collector.paths == {"/v1/traces"}


def test_the_last_spans_are_sent_when_the_service_stops(
    tiny_checkpoint: Path, collector: Collector, tmp_path: Path
) -> None:
    """The interval of the SDK's thread is longer than the test."""
    with serving(
        tiny_checkpoint, tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_BSP_SCHEDULE_DELAY="3600000"
    ) as service:
        assert post(service, "last", prompt="once", max_tokens=3).status_code == 200
        assert service.stop() == 0
    (span,) = spans_of(collector, "last")
    assert span.name == f"POST {TEXT}"
    assert '"prompt"' not in service.log.read_text()
