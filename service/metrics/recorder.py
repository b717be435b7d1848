"""Prometheus metrics of the service, recorded and exposed by the API process."""

import importlib.metadata
import os
import platform
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeAlias

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    values,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from service.ipc.messages import EngineIdle, Finish, FinishReason, StepStats, WorkerReady
from service.metrics.definitions import COMMON_LABELS, FAMILIES, PREFIX, VLLM_PREFIX, Family, Kind
from service.metrics.definitions import EngineState as EngineState
from service.metrics.processes import ProcessUsage

_Instrument: TypeAlias = Counter | Gauge | Histogram
# Counters of engine steps, by the field of `StepStats`.
_STEP_COUNTERS = {
    "num_completion_tokens": "generation_tokens",
    "num_cached_prompt_tokens": "prompt_tokens_cached",
    "num_prefix_queries": "prefix_cache_queries",
    "num_prefix_hits": "prefix_cache_hits",
    "num_preemptions": "num_preemptions",
    "num_drafts": "spec_decode_num_drafts",
    "num_draft_tokens": "spec_decode_num_draft_tokens",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens",
    "num_non_finite": "non_finite_sequences",
}
# With these variables in the environment, prometheus_client would write files, and warn of what files cannot do.
for _variable in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
    os.environ.pop(_variable, None)
values.ValueClass = values.MutexValue
# Service-level objectives. They are histogram bucket bounds, so histograms show attainment too.
TTFT_OBJECTIVE_SECONDS: Final = 0.5
TPOT_OBJECTIVE_SECONDS: Final = 0.05
# Gauges of the last step, which a worker's death drops.
_ENGINE_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "max_num_requests_running")
# Number of buffered steps at which they are written to the metrics, without waiting for a scrape.
_MAX_BUFFERED = 1000


class HistogramBuffer:
    """Counts of a histogram's observations until `flush`; `observe` takes 1/4 of prometheus_client's time."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._upper_bounds = histogram._upper_bounds
        self._counts = [0] * len(self._upper_bounds)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `count` observations of the same value."""
        bucket = bisect_left(self._upper_bounds, value)
        self._counts[bucket] += count  # without a call, so that `flush` in another thread cannot run in between
        self._sum += value * count

    def set_exemplar(self, value: float, labels: dict[str, str]) -> None:
        """Set the exemplar of the value's bucket."""
        bucket = self._histogram._buckets[bisect_left(self._upper_bounds, value)]
        observed_at = time.time()
        bucket.set_exemplar(Exemplar(labels, value, observed_at))

    def flush(self) -> None:
        """Move the counts to the histogram, with the same result as one `observe` call for each observation."""
        counts, self._counts = self._counts, [0] * len(self._counts)
        total, self._sum = self._sum, 0.0
        for bucket, count in enumerate(counts):
            if count:
                self._histogram._buckets[bucket].inc(count)
        self._histogram._sum.inc(total)


class Metrics:
    """All metrics of a service. Step statistics and inter-token latencies are buffered, as writing them is slow."""

    def __init__(self, model_name: str, num_workers: int = 1) -> None:
        self._common = (model_name, "0")  # one engine for routers: its numbers are the sums of all workers
        self._instruments = {name: _instrument(family) for name, family in FAMILIES.items()}
        self._children: dict[tuple[str, ...], Any] = {}
        self._histograms: dict[str, HistogramBuffer] = {}
        self._registry = CollectorRegistry()
        self._registry.register(_Exposition(list(self._instruments.values())))
        self._num_restarts: dict[str, int] = {}
        self._cpu_seconds: dict[int, float] = {}  # of each process at the last scrape, by pid
        for family in FAMILIES.values():
            if family.kind is Kind.HISTOGRAM:
                self._histograms[family.name] = HistogramBuffer(self._metric(family.name))
            elif family.kind is Kind.COUNTER:
                for label_values in family.known:
                    self._metric(family.name, *label_values)
        self._gaps = self._histograms["inter_token_latency_seconds"]
        # By worker: steps that are not written yet, load and limit after the last written step, and KV-cache blocks.
        self._steps: list[list[StepStats]] = [[] for _ in range(num_workers)]
        self._loads: dict[int, tuple[int, int, float]] = {}
        self._limits: dict[int, int] = {}
        self._num_blocks = [0] * num_workers
        packages = ("kvasir", "torch", "litserve")
        version, torch, litserve = (importlib.metadata.version(package) for package in packages)
        self._metric("build_info", version, platform.python_version(), torch, litserve).set(1)

    def _metric(self, name: str, *label_values: str) -> Any:
        """Return the series of the metric with this name and these label values, created if it is missing."""
        key = (name, *label_values)  # kept, because prometheus_client's `labels` costs more than an observation
        if key not in self._children:
            self._children[key] = self._instruments[name].labels(*self._common, *label_values)
        return self._children[key]

    def _clear(self, name: str) -> None:
        self._instruments[name].clear()
        self._children = {key: child for key, child in self._children.items() if key[0] != name}

    def observe_worker_start(self, ready: WorkerReady, worker: int = 0) -> None:
        """Record the KV-cache and start-up time of a new worker, and that it has no running and no waiting choices."""
        self._clear("cache_config_info")  # an earlier worker's labels
        self._num_blocks[worker] = ready.num_blocks
        shape = (str(ready.block_size), str(sum(self._num_blocks)), ready.kv_cache_dtype, ready.device)
        self._metric("cache_config_info", *shape).set(1)
        self._metric("startup_seconds").set(ready.startup_seconds)
        self._metric("fallbacks").set(len(ready.fallbacks))
        self.observe_engine(EngineIdle(), worker)

    def observe_engine(self, event: StepStats | EngineIdle, worker: int = 0) -> None:
        """Record the statistics of a worker's engine step, or that its engine has no work left."""
        if isinstance(event, EngineIdle):
            self._write_steps(worker)
            self._loads[worker] = (0, 0, 0.0)
            self._set_loads()
            return
        steps = self._steps[worker]
        steps.append(event)
        if len(steps) >= _MAX_BUFFERED:
            self._write_steps(worker)

    def _write_steps(self, worker: int) -> None:
        steps, self._steps[worker] = self._steps[worker], []
        if not steps:
            return
        self._loads[worker] = (steps[-1].num_running, steps[-1].num_waiting, steps[-1].kv_usage)
        self._limits[worker] = steps[-1].max_num_running
        self._set_loads()
        for name, numbers in (
            ("batch_size", [step.batch_size for step in steps]),
            ("iteration_tokens_total", [step.num_prompt_tokens + step.num_completion_tokens for step in steps]),
            ("iteration_duration_seconds", [step.step_seconds for step in steps]),
        ):
            for number in numbers:
                self._histograms[name].observe(number)
        busy_seconds = sum(step.step_seconds for step in steps)
        self._metric("engine_busy_seconds").inc(busy_seconds / len(self._steps))
        self._metric("worker_busy_seconds", str(worker)).inc(busy_seconds)
        self._metric("prompt_tokens").inc(sum(step.num_prompt_tokens + step.num_cached_prompt_tokens for step in steps))
        for field, name in _STEP_COUNTERS.items():
            if number := sum(getattr(step, field) for step in steps):
                self._metric(name).inc(number)

    def _set_loads(self) -> None:
        running, waiting, usages = zip(*self._loads.values(), strict=True)
        self._metric("num_requests_running").set(sum(running))
        self._metric("num_requests_waiting").set(sum(waiting))
        self._metric("kv_cache_usage_perc").set(sum(usages) / len(usages))  # of caches of equal size
        if self._limits:
            self._metric("max_num_requests_running").set(sum(self._limits.values()))

    def forget_engine(self, worker: int = 0) -> None:
        """Remove a worker's last engine step from the gauges, because the worker has died."""
        self._write_steps(worker)
        self._loads.pop(worker, None)
        self._limits.pop(worker, None)
        if self._loads:
            self._set_loads()
            return
        for name in _ENGINE_GAUGES:
            self._clear(name)

    def set_gauge(self, name: str, value: float, *label_values: str) -> None:
        """Set the gauge with this name in `FAMILIES`, in the series with these label values."""
        self._metric(name, *label_values).set(value)

    def observe(self, name: str, value: float) -> None:
        """Add a value to the histogram with this name in `FAMILIES`, which has no labels."""
        self._histograms[name].observe(value)

    def set_exemplar(self, name: str, seconds: float, trace_id: str) -> None:
        """Set the trace of a request with this latency as the exemplar of its bucket, in the histogram `name`."""
        self._histograms[name].set_exemplar(seconds, {"trace_id": trace_id})

    def observe_inter_token(self, seconds: float, count: int = 1) -> None:
        """Record `count` inter-token latencies of a choice, each of `seconds`, measured as tokens leave the server."""
        self._gaps.observe(seconds, count)

    def observe_finish(
        self, finish: Finish, *, e2e_seconds: float, ttft_seconds: float | None, max_tokens: int
    ) -> None:
        """Record outcome, latencies and token counts of a choice at its end. `ttft_seconds` is None without a token."""
        self._metric("request_success", finish.reason).inc()
        num_gaps = finish.num_completion_tokens - 1
        tpot = None if ttft_seconds is None or num_gaps < 1 else (e2e_seconds - ttft_seconds) / num_gaps
        if finish.reason not in (FinishReason.ABORT, FinishReason.REFUSED):
            self._count_objectives(ttft_seconds, tpot, is_served=finish.reason is not FinishReason.ERROR)
        if finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self._histograms["e2e_request_latency_seconds"].observe(e2e_seconds)
        if tpot is not None:
            self._histograms["request_time_per_output_token_seconds"].observe(tpot)
        self._histograms["request_queue_time_seconds"].observe(finish.queue_seconds)
        self._histograms["request_prefill_time_seconds"].observe(finish.prefill_seconds)
        self._histograms["request_decode_time_seconds"].observe(finish.decode_seconds)
        self._histograms["request_inference_time_seconds"].observe(finish.prefill_seconds + finish.decode_seconds)
        self._histograms["request_prompt_tokens"].observe(finish.num_prompt_tokens)
        self._histograms["request_generation_tokens"].observe(finish.num_completion_tokens)
        self._histograms["request_params_max_tokens"].observe(max_tokens)

    def _count_objectives(self, ttft: float | None, tpot: float | None, *, is_served: bool) -> None:
        ttft_met = is_served and (ttft is None or ttft <= TTFT_OBJECTIVE_SECONDS)
        tpot_met = is_served and (tpot is None or tpot <= TPOT_OBJECTIVE_SECONDS)
        for slo, met in (("ttft", ttft_met), ("tpot", tpot_met), ("all", ttft_met and tpot_met)):
            self._metric("slo_requests", slo, str(met).lower()).inc()

    def count(self, name: str, *label_values: str) -> None:
        """Add 1 to the counter with this name in `FAMILIES`, in the series with these label values."""
        self._metric(name, *label_values).inc()

    def observe_structured(self, kind: str, outcome: str, compile_seconds: float | None) -> None:
        """Record a request for structured output. `compile_seconds` is None if its grammar was cached."""
        self._metric("structured_requests", kind, outcome).inc()
        if compile_seconds is not None:
            self._histograms["grammar_compile_seconds"].observe(compile_seconds)

    def count_wasted_tokens(self, reason: str, n: int) -> None:
        """Add `n` completion tokens that were computed but not delivered to the client, by reason."""
        self._metric("wasted_tokens", reason).inc(n)

    def set_worker_restarts(self, **numbers: int) -> None:
        """Raise the counter of worker restarts to these totals, by reason (`signal` or `exit`)."""
        for reason, number in numbers.items():
            self._metric("worker_restarts", reason).inc(number - self._num_restarts.get(reason, 0))
            self._num_restarts[reason] = number

    def observe_processes(self, processes: Iterable[ProcessUsage]) -> None:
        """Set the gauge of memory, and raise the counter of CPU time, of all processes with the same name."""
        cpu_seconds, resident_bytes = {}, Counts[str]()
        for process in processes:
            resident_bytes[process.name] += process.resident_bytes
            cpu_seconds[process.pid] = process.cpu_seconds
            spent = process.cpu_seconds - self._cpu_seconds.get(process.pid, 0.0)
            self._metric("process_cpu_seconds", process.name).inc(max(0.0, spent))
        self._cpu_seconds = cpu_seconds
        self._clear("process_resident_memory_bytes")  # processes that have ended
        for name, num_bytes in resident_bytes.items():
            self._metric("process_resident_memory_bytes", name).set(num_bytes)

    def observe_adapters(self, *, running: Iterable[str], waiting: Iterable[str], num_loaded: int, now: float) -> None:
        """Set the gauge of LoRA adapters to the time `now`. Labels: adapter names, and number of loaded adapters."""
        self._clear("lora_requests_info")  # labels of the last scrape
        self._metric("lora_requests_info", ",".join(running), ",".join(waiting), str(num_loaded)).set(now)

    def set_engine_state(self, state: EngineState) -> None:
        """Set the gauge of this state to 1, and the gauges of all other states to 0."""
        for candidate in EngineState:
            self._metric("engine_state", candidate).set(candidate == state)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics and the content type: OpenMetrics, which has exemplars, if accepted, else plain text."""
        for worker in range(len(self._steps)):
            self._write_steps(worker)
        for buffer in self._histograms.values():
            buffer.flush()
        if "application/openmetrics-text" in accept:
            # Any other escaping replaces the colon of vLLM's names.
            body = openmetrics.generate_latest(self._registry, openmetrics.ALLOWUTF8)
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4


class _Exposition(Collector):
    def __init__(self, instruments: list[_Instrument]) -> None:
        self._instruments = instruments

    def collect(self) -> Iterator[Metric]:
        """Yield each metric, followed by the same values under vLLM's name if vLLM has this metric."""
        found = [metric for instrument in self._instruments for metric in instrument.collect()]
        for metric in sorted(found, key=lambda metric: str(metric.name)):
            family = FAMILIES[metric.name.removeprefix(PREFIX)]
            # OpenMetrics allows neither sum nor count for negative bounds. The last bucket is the count.
            omitted = ("_created", "_count") if family.buckets and family.buckets[0] < 0 else "_created"
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith(omitted)]
            yield metric
            if family.in_vllm:
                yield _under_vllm_name(metric)


def _under_vllm_name(metric: Metric) -> Metric:
    name = VLLM_PREFIX + metric.name.removeprefix(PREFIX)
    renamed = Metric(name, f"{metric.documentation} The engine is Kvasir, not vLLM.", metric.type)
    renamed.samples = [s._replace(name=VLLM_PREFIX + s.name.removeprefix(PREFIX)) for s in metric.samples]
    return renamed


def _instrument(family: Family) -> _Instrument:
    name, labels = PREFIX + family.name, (*COMMON_LABELS, *family.labels)
    match family.kind:
        case Kind.COUNTER:
            return Counter(name, family.help, labels, registry=None)
        case Kind.GAUGE:
            return Gauge(name, family.help, labels, registry=None)
        case Kind.HISTOGRAM:
            return Histogram(name, family.help, labels, registry=None, buckets=family.buckets)
