"""Spans of a request: names, attributes, times, parent and events, by the SDK's exporter in memory."""

import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_trace_id
from starlette.testclient import TestClient

from service.config.settings import SettingsError
from service.ipc.messages import Submit, decode_commands, encode_events
from service.metrics.recorder import Metrics
from service.supervisor.api_process import load_tracer
from service.telemetry.request_record import Observe
from service.telemetry.traces import CollectorExporter, RequestTracer
from tests.service.echo import EchoChannel
from tests.service.sequences import make_delta, make_finish, make_hello

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLOSED = "http://127.0.0.1:9"  # discard: a privileged port without a server


@pytest.fixture
def tracer(metrics: Metrics) -> RequestTracer:
    return RequestTracer(CLOSED, "tiny", metrics)


@pytest.fixture
def observers(tracer: RequestTracer) -> list[Observe]:
    return [tracer.record]


@pytest.fixture
def spans(tracer: RequestTracer, client: TestClient) -> Callable[[], dict[str, ReadableSpan]]:
    """Return a function that stops the tracer and returns its spans by name."""
    exporter = InMemorySpanExporter()
    tracer.start(exporter)

    def finished() -> dict[str, ReadableSpan]:
        tracer.close(60.0)
        found = exporter.get_finished_spans()
        assert len({span.name for span in found}) == len(found)
        return {span.name: span for span in found}

    return finished


def attributes(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return dict(span.attributes)


def test_a_request_has_a_server_span_with_its_phases(
    client: TestClient, spans: Callable[[], dict[str, ReadableSpan]]
) -> None:
    before = time.time_ns()
    fields = {"prompt": "abc", "max_tokens": 9, "temperature": 0.5, "top_p": 0.75, "model": "tiny"}
    body = client.post(TEXT, json=fields, headers={"x-request-id": "mine"}).json()
    found = spans()
    assert found.keys() == {f"POST {TEXT}", "queue", "prefill", "decode"}
    request = found[f"POST {TEXT}"]
    assert (request.kind, request.parent, request.status.status_code) == (SpanKind.SERVER, None, StatusCode.UNSET)
    given = attributes(request)
    assert given.pop("gen_ai.server.time_to_first_token") == pytest.approx(body["timings"]["ttft_ms"] / 1000, abs=1e-5)
    assert given == {
        "http.request.method": "POST",
        "http.route": TEXT,
        "http.response.status_code": 200,
        "url.path": TEXT,
        "url.scheme": "http",
        "kvasir.request_id": "mine",
        "kvasir.client_gone": False,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvasir",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.stream": False,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": body["id"],
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert before <= (request.start_time or 0) <= (request.end_time or 0) <= time.time_ns()
    queue, prefill, decode = found["queue"], found["prefill"], found["decode"]
    assert request.context is not None
    for phase, duration in ((queue, 1_000_000), (prefill, 2_000_000), (decode, 500_000_000)):  # of `make_finish`
        assert phase.parent is not None
        assert phase.parent.span_id == request.context.span_id
        assert phase.end_time is not None
        assert phase.end_time - (phase.start_time or 0) == pytest.approx(duration, abs=2)
    assert prefill.start_time == pytest.approx(queue.end_time, abs=2)
    assert decode.start_time == pytest.approx(prefill.end_time, abs=2)
    assert request.resource.attributes["service.name"] == "kvasir"
    accepted = client.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"})
    assert accepted.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    exemplars = re.findall(r'^(\S+)_bucket\{.* # \{trace_id="(\w+)"\}', accepted.text, re.MULTILINE)
    names = ("time_to_first_token_seconds", "e2e_request_latency_seconds")
    trace_id = format_trace_id(request.context.trace_id)
    assert set(exemplars) == {(prefix + name, trace_id) for prefix in ("llm_", "vllm:") for name in names}


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "abc"}]}, "chat"),
        ("/v1/embeddings", {"input": "abc"}, "embeddings"),
    ],
)
def test_the_operation_follows_the_route(
    client: TestClient, spans: Callable[[], dict[str, ReadableSpan]], path: str, body: Any, operation: str
) -> None:
    assert client.post(path, json=body).status_code == 200
    assert attributes(spans()[f"POST {path}"])["gen_ai.operation.name"] == operation


def test_a_rejected_request_has_one_span(client: TestClient, spans: Callable[[], dict[str, ReadableSpan]]) -> None:
    client.post(TEXT, json={"prompt": 3})
    (span,) = spans().values()
    given = attributes(span)
    assert (given["http.response.status_code"], given["error.type"]) == (400, "invalid_request")
    assert span.status.status_code is StatusCode.UNSET  # of a server span: only 5xx are errors


def test_a_failed_request_has_the_status_error(
    client: TestClient, queue: EchoChannel, spans: Callable[[], dict[str, ReadableSpan]]
) -> None:
    queue.failure = "broken"
    client.post(TEXT, json={"prompt": "a"})
    span = spans()[f"POST {TEXT}"]
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "engine_failed")


def test_probes_and_unknown_paths_make_no_span_names(
    client: TestClient, spans: Callable[[], dict[str, ReadableSpan]]
) -> None:
    for path in ("/health", "/ready", "/metrics"):
        client.get(path)
    client.request("BREW", "/v1/nope")
    (span,) = spans().values()
    assert (span.name, attributes(span)["http.request.method"]) == ("HTTP", "_OTHER")


def test_the_parent_of_the_client_is_honoured(client: TestClient, spans: Callable[[], dict[str, ReadableSpan]]) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=value"}
    client.post(TEXT, json={"prompt": "a"}, headers=headers)
    found = spans()
    span = found[f"POST {TEXT}"]
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    for each in found.values():
        assert each.context is not None
        assert f"{each.context.trace_id:032x}" == TRACE
        assert each.context.trace_state.to_header() == "vendor=value"


def test_a_trace_that_the_client_does_not_sample_is_not_exported(
    client: TestClient, spans: Callable[[], dict[str, ReadableSpan]]
) -> None:
    assert (
        client.post(TEXT, json={"prompt": "a"}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}).status_code == 200
    )
    assert spans() == {}


@pytest.mark.parametrize("traceparent", ["", "00-0-0-01", f"00-{'0' * 32}-{PARENT}-01", "\u00ff" * 55])
def test_an_invalid_parent_begins_a_new_trace(
    client: TestClient, spans: Callable[[], dict[str, ReadableSpan]], traceparent: str
) -> None:
    sent = [(b"traceparent", traceparent.encode("latin-1"))]
    assert client.post(TEXT, json={"prompt": "a"}, headers=sent).status_code == 200
    assert spans()[f"POST {TEXT}"].parent is None


def test_a_resubmitted_request_has_an_event_for_each_restart(
    client: TestClient,
    queue: EchoChannel,
    spans: Callable[[], dict[str, ReadableSpan]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first two workers die before they respond."""

    def die_twice(message: bytes) -> None:
        (submit,) = decode_commands(message).commands
        assert isinstance(submit, Submit)
        event = make_delta(submit.uid, attempt=submit.attempt, ids=(97,), text="a", finish=make_finish())
        answer = make_hello(submit.attempt + 1) if submit.attempt < 2 else event
        queue.frontend.receive(encode_events([answer]))

    monkeypatch.setattr(queue, "submit", die_twice)
    client.post(TEXT, json={"prompt": "a"})
    span = spans()[f"POST {TEXT}"]
    assert [(event.name, dict(event.attributes or {})) for event in span.events] == [
        ("worker_restarted", {"attempt": 1}),
        ("worker_restarted", {"attempt": 2}),
    ]
    assert (span.start_time or 0) <= span.events[0].timestamp <= span.events[1].timestamp <= (span.end_time or 0)


def test_a_collector_that_is_down_causes_one_warning_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    monkeypatch.setattr(logging.getLogger("service"), "propagate", True)
    now = [1000.0]
    monkeypatch.setattr("service.telemetry.traces.monotonic", lambda: now[0])
    exporter = CollectorExporter(CLOSED)
    for later in (0.0, 59.0, 1.0, 59.0):
        now[0] += later
        assert exporter.export([]) is SpanExportResult.FAILURE
    exporter.shutdown()
    warnings = [record.getMessage() for record in caplog.records if record.name == "service.telemetry.traces"]
    assert len(warnings) == 2
    assert f"{CLOSED}/v1/traces" in warnings[0]


@pytest.mark.parametrize("endpoint", ["http://a:4318", "http://a:4318/", "http://a:4318/v1/traces"])
def test_the_path_of_traces_is_added_to_the_endpoint(endpoint: str) -> None:
    assert CollectorExporter(endpoint).url == "http://a:4318/v1/traces"


def test_without_the_packages_the_start_fails_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(name="opentelemetry")

    monkeypatch.setattr("pkgutil.resolve_name", fail)
    with pytest.raises(SettingsError, match=r"opentelemetry, .* pip install 'kvasir\[traces\]'") as caught:
        load_tracer(CLOSED, "tiny", Metrics("tiny"))
    assert "\n" not in str(caught.value)


def test_without_an_endpoint_opentelemetry_is_not_imported() -> None:
    """Its import costs a start 70 ms (2 cores)."""
    code = "import sys, service.supervisor.api_process; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0
