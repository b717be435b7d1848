"""Table of all metrics: name, kind, unit, help, labels, buckets. docs/metrics.md is generated from this table.

A metric that vLLM also has (https://docs.vllm.ai/en/stable/usage/metrics/) has vLLM's name after the prefix and is
exposed under both prefixes, so that dashboards and benchmark tools for vLLM work unchanged. No label holds an id, a
user or a prompt, because each label value creates a permanent series.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from service.ipc.messages import FinishReason

PREFIX: Final = "llm_"
VLLM_PREFIX: Final = "vllm:"
COMMON_LABELS: Final = ("model_name", "engine")


class Kind(StrEnum):
    """Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class EngineState(StrEnum):
    """Readiness of the service for new requests. Exactly one state holds at a time."""

    STARTING = "starting"  # no worker has sent `WorkerReady` yet
    READY = "ready"
    RESTARTING = "restarting"  # the worker died; requests wait for its replacement
    STALLED = "stalled"  # the worker hangs: it is ready, but sends no heartbeats
    DRAINING = "draining"  # running requests may finish; new requests are rejected


@dataclass(frozen=True, slots=True)
class Family:
    """Definition of one metric, without values."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()  # names, after the common labels
    # Values of `labels` that a counter has from the start, at 0: Prometheus sees no increase in a series that is new.
    known: tuple[tuple[str, ...], ...] = ((),)
    buckets: tuple[float, ...] = ()
    in_vllm: bool = False

    @property
    def exposed_name(self) -> str:
        """Name of the metric in queries. A histogram's series add `_bucket`, `_sum` or `_count`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


# fmt: off
# vLLM's lowest bounds are 300 ms (end to end) and 10 ms (between tokens). A small model finishes well below those.
_FIRST: Final = (.001, .0025, .005, .01, .02, .04, .06, .08, .1, .16, .25, .5, .75, 1, 2.5, 5, 7.5,
                 10, 20, 40, 80)
_GAP: Final = (.0005, .001, .002, .003, .004, .006, .008, .01, .015, .02, .025, .03, .04, .05, .075,
               .1, .15, .2, .3, .4, .5, .75, 1, 2.5)
_WHOLE: Final = (.001, .0025, .005, .01, .02, .04, .08, .16, .3, .5, .8, 1, 1.5, 2.5, 5,
                 10, 20, 30, 60, 120)
_COMPILE: Final = (.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5)
_STEP: Final = (.0005, .001, .002, .004, .006, .008, .01, .015, .02, .03, .04, .06, .08,
                .1, .15, .2, .3, .5, 1)
_ERROR: Final = (-60, -20, -5, -2, -1, -.5, -.2, -.1, -.05, 0, .05, .1, .2, .5, 1, 2, 5, 20, 60)
_LENGTH: Final = (*(digit * 10**power for power in range(5) for digit in (1, 2, 5)), 100_000)
_BATCH: Final = tuple(2**power for power in range(11))
_BUDGET: Final = tuple(2**power for power in range(15))

_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_FAMILIES = (
    # Latencies of choices that ended with stop or length. A cancelled choice would measure the client's timeout.
    Family("time_to_first_token_seconds", _H, "seconds",
           "Arrival of the request to a choice's first token leaving the server, queue included.",
           buckets=_FIRST, in_vllm=True),
    Family("inter_token_latency_seconds", _H, "seconds",
           "Time between two tokens of one choice, as they leave the server.", buckets=_GAP, in_vllm=True),
    Family("request_time_per_output_token_seconds", _H, "seconds",
           "(End to end - time to first token) / (completion tokens - 1), of choices of two tokens or more.",
           buckets=_GAP, in_vllm=True),
    Family("e2e_request_latency_seconds", _H, "seconds",
           "Arrival of the request to a choice's last token.", buckets=_WHOLE, in_vllm=True),
    Family("slo_requests", _C, "choices",
           "Choices by service-level objective, and whether the choice met it. A failed choice meets no objective.",
           ("slo", "met"), tuple(itertools.product(("ttft", "tpot", "all"), ("true", "false")))),
    # Time of a choice per phase, by the engine's clock.
    Family("request_queue_time_seconds", _H, "seconds",
           "Arrival of the request to the first step that computes the choice.", buckets=_WHOLE, in_vllm=True),
    Family("request_prefill_time_seconds", _H, "seconds",
           "First step that computes the choice to its first token.", buckets=_WHOLE, in_vllm=True),
    Family("request_decode_time_seconds", _H, "seconds",
           "First token of a choice to its last token.", buckets=_WHOLE, in_vllm=True),
    Family("request_inference_time_seconds", _H, "seconds",
           "First step that computes the choice to its last token.", buckets=_WHOLE, in_vllm=True),
    # Size of a choice.
    Family("request_prompt_tokens", _H, "tokens",
           "Prompt length of a choice.", buckets=_LENGTH, in_vllm=True),
    Family("request_generation_tokens", _H, "tokens",
           "Completion length of a choice.", buckets=_LENGTH, in_vllm=True),
    Family("request_params_max_tokens", _H, "tokens",
           "The max_tokens a choice asked for.", buckets=_LENGTH, in_vllm=True),
    # Endings of requests.
    Family("request_success", _C, "choices",
           "Choices that the engine ended, by reason. Includes errors; the name is vLLM's.",
           ("finished_reason",), tuple((reason,) for reason in FinishReason), in_vllm=True),
    Family("request_failures", _C, "requests",
           "Requests that ended with an error response, by HTTP status and error type.", ("status", "error_type"),
           (*((str(status), "invalid_request_error") for status in (400, 401, 403, 404, 405, 408, 413, 415, 431)),
            ("408", "timeout_error"), ("500", "server_error"))),
    Family("admission_rejections", _C, "requests",
           "Requests rejected before any work was done for them.", ("reason",),
           (("queue_full",), ("queue_time",), ("draining",), ("too_many_connections",),
            ("response_store_full",)), in_vllm=True),
    Family("retry_after_error_seconds", _H, "seconds",
           "Error of Retry-After: the time until a rejected request had room, minus the time announced to its client.",
           buckets=_ERROR),
    Family("structured_requests", _C, "requests",
           "Requests for structured output, by kind of grammar and whether the grammar was accepted.",
           ("kind", "outcome"),
           tuple(itertools.product(("json", "regex", "choice", "grammar", "chat"), ("accepted", "refused")))),
    Family("ignored_fields", _C, "requests",
           "Requests with a field that is accepted and ignored, by field.", ("field",), (("messages",), ("metadata",))),
    Family("grammar_compile_seconds", _H, "seconds",
           "Time to compile and check a grammar that was not cached, while its request waits.",
           buckets=_COMPILE),
    Family("requests_cancelled", _C, "requests",
           "Requests whose client disconnected, by phase of the request.", ("phase",), (("waiting",), ("running",))),
    Family("wasted_tokens", _C, "tokens",
           "Completion tokens computed but not delivered; unclaimed: buffered for a client that did not resume.",
           ("reason",), (("cancelled",), ("failed",), ("unclaimed",))),
    Family("non_finite_sequences", _C, "choices",
           "Choices ended with an error because the model computed NaN or infinity for them."),
    # The scheduler.
    Family("num_requests_running", _G, "choices", "Choices that are running.", in_vllm=True),
    Family("max_num_requests_running", _G, "choices",
           "Limit of running choices: --max-num-running, or lower to meet --target-itl-ms."),
    Family("num_requests_waiting", _G, "choices", "Choices that wait in the queue.", in_vllm=True),
    Family("lora_requests_info", _G, "seconds",
           "LoRA adapters of running and of waiting choices, as labels; the value is the time of the scrape.",
           ("running_lora_adapters", "waiting_lora_adapters", "max_lora"), (), in_vllm=True),
    Family("num_preemptions", _C, "preemptions",
           "Choices moved back to the queue because no KV block was free.", in_vllm=True),
    Family("prompt_tokens", _C, "tokens",
           "Prompt tokens processed: computed or found in the prefix cache. Counted again after a preemption.",
           in_vllm=True),
    Family("generation_tokens", _C, "tokens", "Completion tokens generated.", in_vllm=True),
    Family("spec_decode_num_drafts", _C, "drafts", "Drafts proposed by speculative decoding.", in_vllm=True),
    Family("spec_decode_num_draft_tokens", _C, "tokens", "Draft tokens that the model verified.", in_vllm=True),
    Family("spec_decode_num_accepted_tokens", _C, "tokens",
           "Draft tokens that were accepted: each saved its choice one step.", in_vllm=True),
    # The KV-cache.
    Family("kv_cache_usage_perc", _G, "ratio", "Share of KV blocks in use, 0 to 1.", in_vllm=True),
    Family("cache_config_info", _G, "1", "Size, dtype and device of the KV-cache, as labels.",
           ("block_size", "num_gpu_blocks", "cache_dtype", "device"), (), in_vllm=True),
    Family("prefix_cache_queries", _C, "tokens", "Tokens looked up in the prefix cache.", in_vllm=True),
    Family("prefix_cache_hits", _C, "tokens", "Tokens found in the prefix cache.", in_vllm=True),
    Family("prompt_tokens_cached", _C, "tokens",
           "Prompt tokens found in the prefix cache and therefore not computed.", in_vllm=True),
    # The engine's step.
    Family("batch_size", _H, "choices", "Choices computed in an engine step.", buckets=_BATCH),
    Family("iteration_tokens_total", _H, "tokens",
           "Prompt and completion tokens computed in an engine step.", buckets=_BUDGET, in_vllm=True),
    Family("iteration_duration_seconds", _H, "seconds", "Duration of an engine step.", buckets=_STEP),
    Family("engine_busy_seconds", _C, "seconds",
           "Time spent in engine steps, on average over the workers. Its rate is the engines' utilization."),
    Family("worker_busy_seconds", _C, "seconds",
           "Time that a worker spent in engine steps. Its rate is the worker's utilization.", ("worker",), ()),
    # The service.
    Family("engine_state", _G, "1", "State of the service: 1 for the current state, 0 for all other states.",
           ("state",), tuple((state,) for state in EngineState)),
    Family("worker_ready", _G, "1", "1 for a worker that takes requests, 0 while it restarts or hangs.",
           ("worker",), ()),
    Family("startup_seconds", _G, "seconds", "Time from the worker's start to ready: model load and warm-up."),
    Family("fallbacks", _G, "paths",
           "Slower computation paths in use, because faster ones are not available; `/ready` names them."),
    Family("worker_restarts", _C, "restarts", "Workers that died and were replaced.",
           ("reason",), (("signal",), ("exit",))),
    Family("requests_replayed", _C, "requests", "Requests that a dead worker left unfinished, by outcome.",
           ("outcome",), (("resubmitted",), ("gave_up",))),
    Family("requests_resumed", _C, "requests",
           "Connections that resumed a response of an earlier connection, by the header that named the response.",
           ("by",), (("event_id",), ("key",))),
    Family("api_requests", _G, "requests", "Requests that the API process has admitted and not completed."),
    Family("api_tasks", _G, "tasks", "asyncio tasks of the API process, including the task of this scrape."),
    Family("process_resident_memory_bytes", _G, "bytes",
           "Resident memory of the processes with this name. Mapped weights count in each process that reads them.",
           ("process",)),
    Family("process_cpu_seconds", _C, "seconds", "CPU time of the processes with this name.", ("process",), ()),
    Family("build_info", _G, "1", "Versions of Kvasir, Python, torch and LitServe, as labels.",
           ("version", "python", "torch", "litserve"), ()),
)
# fmt: on

FAMILIES: Final[Mapping[str, Family]] = {family.name: family for family in _FAMILIES}
