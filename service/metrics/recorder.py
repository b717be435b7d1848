"""Multiprocess Prometheus metrics: recording in each process, exposition of the sum over all processes.

Each process writes memory-mapped files in one shared directory. The process that serves a scrape adds up the files of
all processes. A counter outlives its process; a gauge is dropped with it (`mark_dead`). Successive workers reuse the
same files, because the disk may be full when a new worker starts.
"""

import atexit
import functools
import importlib.metadata
import os
import platform
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
    values,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from service.ipc.messages import Finish, FinishReason, StepStats, WorkerReady
from service.ipc.serving_path import ServingPath
from service.metrics.definitions import COMMON_LABELS, FAMILIES, PREFIX, VLLM_PREFIX, Family, Kind
from service.metrics.definitions import EngineState as EngineState
from service.metrics.directory import claim, remove_stale_directories, reserve
from service.metrics.histogram_buffer import Tally
from service.metrics.step_metrics_buffer import StepMetricsBuffer

WORKER: Final = "worker"  # file name of the worker and of each worker that replaces it
_DIRECTORY_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client's name
_DIRECTORY_PREFIX: Final = "kvasir-metrics-"
# Header of an empty prometheus_client file: the number of used bytes, which includes the 8-byte header.
_NOTHING_USED: Final = struct.pack("i", 8)
_Instrument: TypeAlias = Counter | Gauge | Histogram


@dataclass(frozen=True, kw_only=True, slots=True)
class Objectives:
    """Service-level objectives. The defaults are histogram bucket bounds, so histograms show attainment too."""

    ttft_seconds: float = 0.5
    tpot_seconds: float = 0.05


class Metrics:
    """Metrics of one engine, as recorded by this process.

    Args:
        process: name in the file names, for successive processes that share files; None uses the process id. At most
            one live process may use a name.

    Raises:
        RuntimeError: `prepare_directory` has run neither in this process nor in an ancestor.
    """

    def __init__(
        self, model_name: str, *, engine: str = "0", objectives: Objectives | None = None, process: str | None = None
    ) -> None:
        self._common = (model_name, engine)
        self._process = process
        self._instruments = _instruments(_directory(), process)
        self._objectives = Objectives() if objectives is None else objectives
        for family in FAMILIES.values():
            if family.kind is Kind.COUNTER:
                for label_values in family.known:
                    self._counter(family.name, *label_values)

        # The labelled children are looked up once, because `labels()` costs more than an observation.
        self._ttft = self._histogram("time_to_first_token_seconds")
        self._gaps = Tally(self._histogram("inter_token_latency_seconds"))
        self._tpot = self._histogram("request_time_per_output_token_seconds")
        self._e2e = self._histogram("e2e_request_latency_seconds")
        self._retry_after_error = self._histogram("retry_after_error_seconds")
        self._grammar_compile = self._histogram("grammar_compile_seconds")
        self._queue = self._histogram("request_queue_time_seconds")
        self._prefill = self._histogram("request_prefill_time_seconds")
        self._decode = self._histogram("request_decode_time_seconds")
        self._inference = self._histogram("request_inference_time_seconds")
        self._request_prompt_tokens = self._histogram("request_prompt_tokens")
        self._request_generation_tokens = self._histogram("request_generation_tokens")
        self._request_max_tokens = self._histogram("request_params_max_tokens")
        self.reserve_disk_space()

    def reserve_disk_space(self) -> None:
        """Allocate disk space for this process' metric files now.

        Raises:
            OSError: the disk is full.
        """
        self._counter("requests_replayed", "resubmitted").inc(0)  # makes a forked child create its own files
        self._steps = StepMetricsBuffer(counter=self._counter, gauge=self._gauge, histogram=self._histogram)
        packages = ("kvasir", "torch", "litserve")
        version, torch, litserve = (importlib.metadata.version(package) for package in packages)
        self._gauge("build_info", version, platform.python_version(), torch, litserve).set(1)
        reserve(_directory(), self._process or os.getpid())

    def observe_worker_start(self, hello: WorkerReady) -> None:
        """Record that a worker is ready and idle."""
        shape = (str(hello.block_size), str(hello.num_blocks), hello.kv_cache_dtype, hello.device)
        self._gauge("cache_config_info", *shape).set(1)
        self._gauge("startup_seconds").set(hello.startup_seconds)
        self.observe_idle()

    def record_serving_path(self, path: ServingPath) -> None:
        """Record the code path of a ready worker."""
        self._gauge("serving_path", *path.labels).set(1)

    def observe_idle(self) -> None:
        """Record that the engine has no work left."""
        self._steps.rest()

    def observe_step(self, stats: StepStats) -> None:
        """Record an engine step. A scrape sees the step up to 0.1 s later, or after `flush`."""
        self._steps.add(stats)

    def observe_first_token(self, seconds: float) -> None:
        """Record that a choice's first token left the server `seconds` after its request arrived."""
        self._ttft.observe(seconds)

    def observe_inter_token(self, seconds: float, count: int = 1) -> None:
        """Record that `count` tokens of a choice left the server, `seconds` apart. A scrape sees them after `flush`."""
        self._gaps.add(seconds, count)

    def flush(self) -> None:
        """Write buffered observations to the shared files, so that scrapes see them."""
        self._gaps.flush()
        self._steps.flush()

    def observe_finish(
        self, finish: Finish, *, e2e_seconds: float, ttft_seconds: float | None, max_tokens: int
    ) -> None:
        """Record the end of a choice. `ttft_seconds` is None if the choice had no token."""
        self._counter("request_success", finish.reason).inc()
        num_gaps = finish.num_completion_tokens - 1
        tpot = None if ttft_seconds is None or num_gaps < 1 else (e2e_seconds - ttft_seconds) / num_gaps
        if finish.reason not in (FinishReason.ABORT, FinishReason.REFUSED):
            self._count_objectives(ttft_seconds, tpot, is_served=finish.reason is not FinishReason.ERROR)
        if finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self._e2e.observe(e2e_seconds)
        if tpot is not None:
            self._tpot.observe(tpot)
        self._queue.observe(finish.queue_seconds)
        self._prefill.observe(finish.prefill_seconds)
        self._decode.observe(finish.decode_seconds)
        self._inference.observe(finish.prefill_seconds + finish.decode_seconds)
        self._request_prompt_tokens.observe(finish.num_prompt_tokens)
        self._request_generation_tokens.observe(finish.num_completion_tokens)
        self._request_max_tokens.observe(max_tokens)

    def _count_objectives(self, ttft: float | None, tpot: float | None, *, is_served: bool) -> None:
        ttft_met = is_served and (ttft is None or ttft <= self._objectives.ttft_seconds)
        tpot_met = is_served and (tpot is None or tpot <= self._objectives.tpot_seconds)
        for slo, met in (("ttft", ttft_met), ("tpot", tpot_met), ("all", ttft_met and tpot_met)):
            self._counter("slo_requests", slo, str(met).lower()).inc()

    def count_rejection(self, reason: str) -> None:
        """Count a request that was rejected before any work was done for it."""
        self._counter("admission_rejections", reason).inc()

    def observe_retry_after_error(self, seconds: float) -> None:
        """Record the error of a Retry-After: the time at which room appeared minus the announced time, in seconds."""
        self._retry_after_error.observe(seconds)

    def observe_structured(self, kind: str, outcome: str, compile_seconds: float | None) -> None:
        """Record a structured request. `compile_seconds` is None if its grammar was cached."""
        self._counter("structured_requests", kind, outcome).inc()
        if compile_seconds is not None:
            self._grammar_compile.observe(compile_seconds)

    def count_failure(self, status: int, error_type: str) -> None:
        """Count a request that ended with an error response."""
        self._counter("request_failures", str(status), error_type).inc()

    def count_cancellation(self, phase: str) -> None:
        """Count a client that disconnected while its request was in `phase`."""
        self._counter("requests_cancelled", phase).inc()

    def count_wasted_tokens(self, reason: str, n: int) -> None:
        """Count `n` completion tokens that were computed but not delivered."""
        self._counter("wasted_tokens", reason).inc(n)

    def count_worker_restart(self, reason: str) -> None:
        """Count a worker that died and was replaced."""
        self._counter("worker_restarts", reason).inc()

    def count_replay(self, outcome: str) -> None:
        """Count a request that a dead worker left unfinished: "resubmitted" or "gave_up"."""
        self._counter("requests_replayed", outcome).inc()

    def count_resumption(self, by: str) -> None:
        """Count a connection that resumed a buffered response by "event_id" or by "key"."""
        self._counter("requests_resumed", by).inc()

    def observe_api(self, *, num_requests: int, num_tasks: int) -> None:
        """Record the API process' current numbers of requests and asyncio tasks."""
        self._gauge("api_requests").set(num_requests)
        self._gauge("api_tasks").set(num_tasks)

    def set_engine_state(self, state: EngineState) -> None:
        """Set the state gauge. Only one process may call this: a second process would overwrite the value."""
        for candidate in EngineState:
            self._gauge("engine_state", candidate).set(candidate == state)

    def _counter(self, name: str, *label_values: str) -> Counter:
        counter = self._instruments[name].labels(*self._common, *label_values)
        assert isinstance(counter, Counter), f"{name} is not a counter"
        return counter

    def _gauge(self, name: str, *label_values: str) -> Gauge:
        gauge = self._instruments[name].labels(*self._common, *label_values)
        assert isinstance(gauge, Gauge), f"{name} is not a gauge"
        return gauge

    def _histogram(self, name: str) -> Histogram:
        histogram = self._instruments[name].labels(*self._common)
        assert isinstance(histogram, Histogram), f"{name} is not a histogram"
        return histogram


def prepare_directory() -> str:
    """Create the directory for the metric files of this process and its children; it is removed at exit.

    Also removes the stale directories of killed services. Call this once, in the main process, before it starts
    children or constructs `Metrics`.
    """
    directory = tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX)
    claim(Path(directory))
    remove_stale_directories(Path(directory).parent, _DIRECTORY_PREFIX)
    os.environ[_DIRECTORY_VARIABLE] = directory
    atexit.register(_remove_directory, directory, os.getpid())
    return directory


def mark_dead(process: str | int) -> None:
    """Drop the gauges of a dead process, by name or process id. Its counters and its disk space are kept."""
    for path in Path(_directory()).glob(f"gauge_live*_{process}.db"):
        with path.open("r+b") as file:
            file.write(_NOTHING_USED)


def render() -> tuple[bytes, str]:
    """Return the metrics of all processes, with the counters of dead processes, and the content type."""
    registry = CollectorRegistry()
    registry.register(_AllProcesses())
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class _AllProcesses(Collector):
    def collect(self) -> Iterator[Metric]:
        """Yield each family, followed by the same values under vLLM's name if vLLM has this metric."""
        found = multiprocess.MultiProcessCollector(None, _directory()).collect()
        for metric in sorted(found, key=lambda metric: str(metric.name)):
            yield metric
            family = FAMILIES.get(metric.name.removeprefix(PREFIX))
            if family is not None and family.in_vllm:
                yield _under_vllm_name(metric)


def _under_vllm_name(metric: Metric) -> Metric:
    name = VLLM_PREFIX + metric.name.removeprefix(PREFIX)
    twin = Metric(name, f"{metric.documentation} The engine is Kvasir, not vLLM.", metric.type)
    twin.samples = [s._replace(name=VLLM_PREFIX + s.name.removeprefix(PREFIX)) for s in metric.samples]
    return twin


@functools.cache
def _instruments(directory: str, process: str | None) -> Mapping[str, _Instrument]:
    """Return this process' instruments on `directory`. Cached: two on one series would overwrite each other."""
    # prometheus_client chooses between in-process and multiprocess values at import, which may be before
    # `prepare_directory`. Setting the class here makes the order of imports irrelevant.
    values.ValueClass = values.MultiProcessValue(os.getpid if process is None else lambda: process)
    return {name: _instrument(family) for name, family in FAMILIES.items()}


def _instrument(family: Family) -> _Instrument:
    name, labels = PREFIX + family.name, (*COMMON_LABELS, *family.labels)
    match family.kind:
        case Kind.COUNTER:
            return Counter(name, family.help, labels, registry=None)
        case Kind.GAUGE:
            # The most recent value wins: a replacement worker's value shows before the old worker is marked dead.
            return Gauge(name, family.help, labels, registry=None, multiprocess_mode="livemostrecent")
        case Kind.HISTOGRAM:
            return Histogram(name, family.help, labels, registry=None, buckets=family.buckets)


def _directory() -> str:
    directory = os.environ.get(_DIRECTORY_VARIABLE)
    if directory is None:
        raise RuntimeError("service.metrics.recorder.prepare_directory() has not run")
    return directory


def _remove_directory(directory: str, tenant: int) -> None:
    if os.getpid() == tenant:  # forked children inherit exit handlers
        shutil.rmtree(directory, ignore_errors=True)
