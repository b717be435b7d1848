"""All calls that record metrics of a service, with the expected changes of the samples in `/metrics`."""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from service.ipc.messages import Finish, FinishReason, StepStats, WorkerReady
from service.metrics.processes import ProcessUsage
from service.metrics.recorder import EngineState, Metrics

MODEL = "tales"

HELLO = WorkerReady(
    epoch=0,
    device="cpu",
    dtype="float32",
    attention="native",
    kernel_level="avx2",
    kv_cache_dtype="float16",
    num_blocks=64,
    block_size=16,
    startup_seconds=1.5,
    fallbacks=("native kernels: no C++ compiler",),
)
STEP = StepStats(
    num_running=3,
    max_num_running=6,
    num_waiting=2,
    kv_usage=0.25,
    batch_size=4,
    num_prompt_tokens=40,
    num_completion_tokens=3,
    num_cached_prompt_tokens=16,
    num_prefix_queries=56,
    num_prefix_hits=32,
    num_preemptions=1,
    num_drafts=2,
    num_draft_tokens=7,
    num_accepted_tokens=5,
    step_seconds=0.0625,
    num_non_finite=1,
)


def finish(reason: FinishReason, *, num_completion_tokens: int = 9) -> Finish:
    """Return the end of a completion with a different duration for each phase, so that a mix-up of phases fails."""
    return Finish(
        reason=reason,
        stop_reason=None,
        error=None,
        num_prompt_tokens=40,
        num_completion_tokens=num_completion_tokens,
        num_cached_tokens=16,
        num_preemptions=0,
        queue_seconds=0.125,
        prefill_seconds=0.25,
        decode_seconds=0.5,
    )


def with_api_load(metrics: Metrics) -> None:
    metrics.set_gauge("api_requests", 3)
    metrics.set_gauge("api_tasks", 11)


def finished(
    metrics: Metrics,
    reason: FinishReason = FinishReason.STOP,
    *,
    num_completion_tokens: int = 9,
    e2e_seconds: float = 0.5,
    ttft_seconds: float | None = 0.25,
) -> None:
    """Record the end of a completion, by default with 8 gaps between tokens in a quarter of a second."""
    metrics.observe_finish(
        finish(reason, num_completion_tokens=num_completion_tokens),
        e2e_seconds=e2e_seconds,
        ttft_seconds=ttft_seconds,
        max_tokens=32,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """One call that records metrics, and the change of every sample that it may change, except buckets."""

    name: str
    make: Callable[[Metrics], None]
    changes: dict[str, float]


def _once(name: str, seconds: float) -> dict[str, float]:
    return {f"{name}_count": 1, f"{name}_sum": seconds}


_STOPPED = (
    {'request_success_total{finished_reason="stop"}': 1}
    | {f'slo_requests_total{{met="true",slo="{slo}"}}': 1 for slo in ("ttft", "tpot", "all")}
    | _once("e2e_request_latency_seconds", 0.5)
    | _once("request_time_per_output_token_seconds", 0.25 / 8)
    | _once("request_queue_time_seconds", 0.125)
    | _once("request_prefill_time_seconds", 0.25)
    | _once("request_decode_time_seconds", 0.5)
    | _once("request_inference_time_seconds", 0.75)
    | _once("request_prompt_tokens", 40)
    | _once("request_generation_tokens", 9)
    | _once("request_params_max_tokens", 32)
)
_STEPPED = (
    {
        "num_requests_running": 3,
        "max_num_requests_running": 6,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "prompt_tokens_total": 56,
        "generation_tokens_total": 3,
        "prompt_tokens_cached_total": 16,
        "prefix_cache_queries_total": 56,
        "prefix_cache_hits_total": 32,
        "num_preemptions_total": 1,
        "spec_decode_num_drafts_total": 2,
        "spec_decode_num_draft_tokens_total": 7,
        "spec_decode_num_accepted_tokens_total": 5,
        "non_finite_sequences_total": 1,
        "engine_busy_seconds_total": 0.0625,
        'worker_busy_seconds_total{worker="0"}': 0.0625,
    }
    | _once("batch_size", 4)
    | _once("iteration_tokens_total", 43)
    | _once("iteration_duration_seconds", 0.0625)
)

OBSERVATIONS = (
    Observation(
        name="worker_start",
        make=lambda metrics: metrics.observe_worker_start(HELLO),
        changes={
            'cache_config_info{block_size="16",cache_dtype="float16",device="cpu",num_gpu_blocks="64"}': 1,
            "startup_seconds": 1.5,
            "fallbacks": 1,
        },
    ),
    Observation(name="step", make=lambda metrics: metrics.observe_engine(STEP), changes=_STEPPED),
    Observation(
        name="first_token",
        make=lambda metrics: metrics.observe("time_to_first_token_seconds", 0.25),
        changes=_once("time_to_first_token_seconds", 0.25),
    ),
    Observation(
        name="inter_token",
        make=lambda metrics: metrics.observe_inter_token(0.125, count=3),
        changes={"inter_token_latency_seconds_count": 3, "inter_token_latency_seconds_sum": 0.375},
    ),
    Observation(name="finish", make=finished, changes=_STOPPED),
    Observation(
        name="rejection",
        make=lambda metrics: metrics.count("admission_rejections", "queue_full"),
        changes={'admission_rejections_total{reason="queue_full"}': 1},
    ),
    Observation(
        name="retry_after_error",
        make=lambda metrics: metrics.observe("retry_after_error_seconds", -0.125),
        changes={'retry_after_error_seconds_bucket{le="+Inf"}': 1},  # no sum and count, since values may be negative
    ),
    Observation(
        name="structured",
        make=lambda metrics: metrics.observe_structured("json", "refused", 0.125),
        changes={'structured_requests_total{kind="json",outcome="refused"}': 1}
        | _once("grammar_compile_seconds", 0.125),
    ),
    Observation(
        name="ignored_field",
        make=lambda metrics: metrics.count("ignored_fields", "metadata"),
        changes={'ignored_fields_total{field="metadata"}': 1},
    ),
    Observation(
        name="failure",
        make=lambda metrics: metrics.count("request_failures", "500", "server_error"),
        changes={'request_failures_total{error_type="server_error",status="500"}': 1},
    ),
    Observation(
        name="cancellation",
        make=lambda metrics: metrics.count("requests_cancelled", "running"),
        changes={'requests_cancelled_total{phase="running"}': 1},
    ),
    Observation(
        name="wasted_tokens",
        make=lambda metrics: metrics.count_wasted_tokens("cancelled", 7),
        changes={'wasted_tokens_total{reason="cancelled"}': 7},
    ),
    Observation(
        name="worker_restart",
        make=lambda metrics: metrics.set_worker_restarts(signal=1),
        changes={'worker_restarts_total{reason="signal"}': 1},
    ),
    Observation(
        name="worker_ready",
        make=lambda metrics: metrics.set_gauge("worker_ready", True, "1"),
        changes={'worker_ready{worker="1"}': 1},
    ),
    Observation(
        name="replay",
        make=lambda metrics: metrics.count("requests_replayed", "resubmitted"),
        changes={'requests_replayed_total{outcome="resubmitted"}': 1},
    ),
    Observation(
        name="resumption",
        make=lambda metrics: metrics.count("requests_resumed", "key"),
        changes={'requests_resumed_total{by="key"}': 1},
    ),
    Observation(
        name="api",
        make=with_api_load,
        changes={"api_requests": 3, "api_tasks": 11},
    ),
    Observation(
        name="processes",
        make=lambda metrics: metrics.observe_processes([ProcessUsage(7, "kvasir-api", 4096, 1.5)]),
        changes={
            'process_resident_memory_bytes{process="kvasir-api"}': 4096,
            'process_cpu_seconds_total{process="kvasir-api"}': 1.5,
        },
    ),
    Observation(
        name="adapters",
        make=lambda metrics: metrics.observe_adapters(running=["a", "b"], waiting=["b"], num_loaded=3, now=5.0),
        changes={'lora_requests_info{max_lora="3",running_lora_adapters="a,b",waiting_lora_adapters="b"}': 5},
    ),
    Observation(
        name="engine_state",
        make=lambda metrics: metrics.set_engine_state(EngineState.READY),
        changes={'engine_state{state="ready"}': 1},
    ),
)


def scrape(metrics: Metrics, prefix: str = "llm_", *, model_name: str = MODEL, engine: str = "0") -> dict[str, float]:
    """Return the samples of one engine with one prefix, as `name{label="value"}` without prefix and common labels."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if (labels.pop("model_name"), labels.pop("engine")) != (model_name, engine):
                continue
            if sample.name.startswith(prefix):
                written = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
                samples[sample.name.removeprefix(prefix) + (f"{{{written}}}" if written else "")] = sample.value
    return samples


def observe_everything(metrics: Metrics) -> None:
    """Call every observation once."""
    for observation in OBSERVATIONS:
        observation.make(metrics)
