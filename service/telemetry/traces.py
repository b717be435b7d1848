"""OpenTelemetry traces of requests, sent to a collector over HTTP. Imported only if an endpoint is set.

All spans of a request are made at its end, from its `RequestRecord`, with explicit start and end times. The SDK's
thread sends the spans.
"""

import logging
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    NoOpTracer,
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.metrics.recorder import Metrics
from service.telemetry.request_record import Generation, RequestRecord

logger = logging.getLogger(__name__)

_WARNING_SECONDS: Final = 60.0
_TRACES_PATH: Final = "/v1/traces"
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
# Values of gen_ai.operation.name (https://opentelemetry.io/docs/specs/semconv/gen-ai/), by route; any other: chat.
_OPERATIONS: Final = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}


class CollectorExporter(SpanExporter):
    """Exporter to the collector. A failed export is a warning, at most one a minute; its spans are lost."""

    def __init__(self, endpoint: str) -> None:
        base = endpoint.rstrip("/")
        self.url = base if base.endswith(_TRACES_PATH) else base + _TRACES_PATH
        self._exporter = OTLPSpanExporter(self.url)
        self._next_warning_seconds = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans to the collector, and return the result. OpenTelemetry's SDK calls this in its thread."""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS and monotonic() >= self._next_warning_seconds:
            self._next_warning_seconds = monotonic() + _WARNING_SECONDS
            message = (
                "traces could not be sent to %s, and are lost; check the collector, or set another --otlp-endpoint"
            )
            logger.warning(message, self.url)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class RequestTracer:
    """Tracer of requests, whose ids become exemplars of the metrics. `start` begins the SDK's thread: after the fork.

    Settings other than the endpoint are the standard's environment variables, such as OTEL_EXPORTER_OTLP_HEADERS,
    OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER.
    """

    def __init__(self, endpoint: str, model_name: str, metrics: Metrics) -> None:
        self._endpoint = endpoint
        self._model_name = model_name
        self._metrics = metrics
        self._provider: TracerProvider | None = None
        self._tracer: Tracer = NoOpTracer()

    def start(self, exporter: SpanExporter | None = None) -> None:
        """Start to export spans: with `exporter`, else to the collector."""
        # The SDK logs each failure several times; CollectorExporter reports failures instead.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        resource = Resource({"service.name": "kvasir"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or CollectorExporter(self._endpoint)))
        self._tracer = self._provider.get_tracer("kvasir")

    def close(self, timeout_seconds: float) -> None:
        """Stop tracing, and send the remaining spans for at most `timeout_seconds`; a warning reports lost spans."""
        if self._provider is not None:
            # A daemon thread, since an export may hang for longer.
            flush = threading.Thread(target=self._provider.shutdown, daemon=True)
            flush.start()
            flush.join(timeout_seconds)
            if flush.is_alive():
                logger.warning("the last traces were not sent within %g s, and are lost", timeout_seconds)

    def record(self, record: RequestRecord) -> None:
        """Make the spans of a request that has ended: the request, and within it queue, prefill and decode.

        Requests of probes, and requests rejected before their head was complete, get no spans.
        """
        if record.method is None or record.is_probe:
            return
        method = record.method if record.method in _METHODS else "HTTP"
        span = self._tracer.start_span(
            method if record.route is None else f"{method} {record.route}",
            # Without a valid traceparent, the span begins a trace.
            TraceContextTextMapPropagator().extract(record.headers),
            SpanKind.SERVER,
            {name: value for name, value in _http_attributes(record).items() if value is not None},
            start_time=record.start_ns,
        )
        if (done := record.generation) is not None and span.is_recording():
            attributes = self._model_attributes(record, done)
            span.set_attributes({name: value for name, value in attributes.items() if value is not None})
            self._add_phases(span, record, done)
            trace_id = format_trace_id(span.get_span_context().trace_id)
            if done.ttft_seconds is not None:
                self._metrics.set_exemplar("time_to_first_token_seconds", done.ttft_seconds, trace_id)
            if record.error is None:
                self._metrics.set_exemplar("e2e_request_latency_seconds", record.total_seconds, trace_id)
        if record.error is not None and (record.status >= 500 or record.status < 300) and not record.is_client_gone:
            span.set_status(StatusCode.ERROR, record.error)
        span.end(_nanoseconds(record, record.start + record.total_seconds))

    def _model_attributes(self, record: RequestRecord, done: Generation) -> dict[str, Any]:
        params = done.choices[0].submit.params
        is_sampled = params.max_tokens > 0
        return {
            "gen_ai.operation.name": _OPERATIONS.get(record.route or "", "chat"),
            "gen_ai.provider.name": "kvasir",
            "gen_ai.request.model": done.model or self._model_name,
            "gen_ai.request.max_tokens": params.max_tokens if is_sampled else None,
            "gen_ai.request.temperature": params.temperature if is_sampled else None,
            "gen_ai.request.top_p": params.top_p if is_sampled else None,
            "gen_ai.request.choice.count": len(done.choices) if len(done.choices) > 1 else None,
            "gen_ai.request.stream": done.is_stream,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": done.response_id,
            "gen_ai.response.finish_reasons": [reason for reason in done.finish_reasons if reason is not None],
            "gen_ai.usage.input_tokens": done.num_prompt_tokens,
            "gen_ai.usage.output_tokens": done.num_completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": done.num_cached_tokens,
            "gen_ai.server.time_to_first_token": done.ttft_seconds,
        }

    def _add_phases(self, span: Span, record: RequestRecord, done: Generation) -> None:
        """Add the spans of the phases that have ended, and an event for each resubmission after a worker's death."""
        for attempt, seconds in enumerate(done.restarts, 1):
            span.add_event("worker_restarted", {"attempt": attempt}, _nanoseconds(record, seconds))
        queued = done.start + (done.queue_seconds or 0.0)
        for name, start, duration in (
            ("queue", done.start, done.queue_seconds),
            ("prefill", queued, done.prefill_seconds),
            ("decode", done.decode_start, done.decode_seconds),
        ):
            if start is not None and duration is not None:
                began = _nanoseconds(record, start)
                child = self._tracer.start_span(name, set_span_in_context(span), start_time=began)
                child.end(_nanoseconds(record, start + duration))


def _http_attributes(record: RequestRecord) -> dict[str, Any]:
    """Return the attributes of an HTTP server span (https://opentelemetry.io/docs/specs/semconv/http/http-spans/)."""
    return {
        "http.request.method": record.method if record.method in _METHODS else "_OTHER",
        "http.route": record.route,
        "http.response.status_code": record.status,
        "url.path": record.path,
        "url.scheme": "http",
        "error.type": record.error,
        "kvasir.request_id": record.request_id,
        "kvasir.key": record.key,
        "kvasir.client_gone": record.is_client_gone,
    }


def _nanoseconds(record: RequestRecord, seconds: float) -> int:
    """Return a time of `time.monotonic()` as nanoseconds since 1970."""
    return record.start_ns + round((seconds - record.start) * 1e9)
