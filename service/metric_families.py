"""Every metric once: name, kind, unit, help, labels, buckets. Plain values; docs/metrics.md is made from them.

Every series carries the labels `model_name` and `engine`, and never an id, a user or a prompt: a label value
costs a series for ever. What vLLM measures too (https://docs.vllm.ai/en/stable/usage/metrics/) has vLLM's name
behind the prefix, and is exposed under both prefixes: dashboards, autoscalers and benchmark tools written for it
work as they are.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from service.messages import FinishReason

PREFIX: Final = "llm_"
VLLM_PREFIX: Final = "vllm:"
COMMON_LABELS: Final = ("model_name", "engine")


class Kind(StrEnum):
    """How a family behaves, in Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class EngineState(StrEnum):
    """What the service can do for a new request; exactly one holds."""

    STARTING = "starting"  # no worker has said hello yet
    READY = "ready"
    RESTARTING = "restarting"  # the worker died; requests wait for the next one
    STALLED = "stalled"  # the worker hangs: it is up and gives no sign of life
    DRAINING = "draining"  # what runs may finish, new requests are refused


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: everything about it but its values.

    `labels` come after the common ones. `known` are their values as far as they are known beforehand: a counter
    has these series from the start, at 0, because Prometheus sees no increase in a series that appears.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ((),)
    buckets: tuple[float, ...] = ()
    in_vllm: bool = False

    @property
    def exposed_name(self) -> str:
        """The name queries use; a histogram's goes on with `_bucket`, `_sum` or `_count`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


# fmt: off
# vLLM's bounds begin at 300 ms (end to end) and 10 ms (between tokens), where a small model is long done.
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
    # What a client sees, of choices that ended with stop or length: other ends only say when somebody gave up.
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
           "Choices by objective, and whether they met it. One that failed meets none.",
           ("slo", "met"), tuple(itertools.product(("ttft", "tpot", "all"), ("true", "false")))),
    # Where its time went, by the engine's clock.
    Family("request_queue_time_seconds", _H, "seconds",
           "Arrival to first scheduled.", buckets=_WHOLE, in_vllm=True),
    Family("request_prefill_time_seconds", _H, "seconds",
           "First scheduled to first token.", buckets=_WHOLE, in_vllm=True),
    Family("request_decode_time_seconds", _H, "seconds",
           "First token to last token.", buckets=_WHOLE, in_vllm=True),
    Family("request_inference_time_seconds", _H, "seconds",
           "First scheduled to last token.", buckets=_WHOLE, in_vllm=True),
    # How large it was.
    Family("request_prompt_tokens", _H, "tokens",
           "Prompt length of a choice.", buckets=_LENGTH, in_vllm=True),
    Family("request_generation_tokens", _H, "tokens",
           "Completion length of a choice.", buckets=_LENGTH, in_vllm=True),
    Family("request_params_max_tokens", _H, "tokens",
           "The max_tokens a choice asked for.", buckets=_LENGTH, in_vllm=True),
    # How requests end.
    Family("request_success", _C, "choices",
           "Choices that the engine ended, by reason (vLLM's name: errors are among them).",
           ("finished_reason",), tuple((reason,) for reason in FinishReason), in_vllm=True),
    Family("request_failures", _C, "requests",
           "Requests answered with an error, by HTTP status and error type.", ("status", "error_type"),
           (*((status, "invalid_request_error") for status in ("400", "401", "404", "405", "408", "413", "415", "431")),
            ("408", "timeout_error"), ("500", "server_error"))),
    Family("admission_rejections", _C, "requests",
           "Requests refused before any work was done for them.", ("reason",),
           (("queue_full",), ("queue_time",), ("draining",), ("too_many_connections",)), in_vllm=True),
    Family("retry_after_error_seconds", _H, "seconds",
           "When there was room for a request that had been refused, after the time it was told; below 0: before.",
           buckets=_ERROR),
    Family("structured_requests", _C, "requests",
           "Requests that asked for a form of their completions, by its kind and whether it can be followed.",
           ("kind", "outcome"),
           tuple(itertools.product(("json", "regex", "choice", "grammar"), ("accepted", "refused")))),
    Family("grammar_compile_seconds", _H, "seconds",
           "Time to compile and try out a form that was not remembered, for a request that waits for it.",
           buckets=_COMPILE),
    Family("requests_cancelled", _C, "requests",
           "Requests whose client left, by what they were doing.", ("phase",), (("waiting",), ("running",))),
    Family("wasted_tokens", _C, "tokens",
           "Completion tokens computed for nobody; unclaimed: kept for a client that did not come back.",
           ("reason",), (("cancelled",), ("failed",), ("unclaimed",))),
    Family("non_finite_sequences", _C, "choices",
           "Choices ended with an error because the model computed NaN or infinity for them."),
    # The scheduler.
    Family("num_requests_running", _G, "choices", "Choices that compute.", in_vllm=True),
    Family("max_num_requests_running", _G, "choices",
           "Choices that may compute at once: --max-num-running, or fewer to keep --target-itl-ms."),
    Family("num_requests_waiting", _G, "choices", "Choices that wait for room.", in_vllm=True),
    Family("num_preemptions", _C, "preemptions",
           "Choices put back in the queue for want of KV blocks.", in_vllm=True),
    Family("prompt_tokens", _C, "tokens",
           "Prompt tokens taken in: computed, or found in the prefix cache. Again after a preemption.", in_vllm=True),
    Family("generation_tokens", _C, "tokens", "Completion tokens generated.", in_vllm=True),
    Family("spec_decode_num_drafts", _C, "drafts", "Drafts of what may follow a sequence.", in_vllm=True),
    Family("spec_decode_num_draft_tokens", _C, "tokens", "Tokens of drafts that the model was given.", in_vllm=True),
    Family("spec_decode_num_accepted_tokens", _C, "tokens",
           "Tokens of drafts that were drawn: each saved a step of its choice.", in_vllm=True),
    # The KV-cache.
    Family("kv_cache_usage_perc", _G, "ratio", "Share of KV blocks in use, 0 to 1.", in_vllm=True),
    Family("cache_config_info", _G, "1", "The KV-cache's shape, in labels.",
           ("block_size", "num_gpu_blocks", "cache_dtype", "device"), (), in_vllm=True),
    Family("prefix_cache_queries", _C, "tokens", "Tokens looked up in the prefix cache.", in_vllm=True),
    Family("prefix_cache_hits", _C, "tokens", "Tokens found in the prefix cache.", in_vllm=True),
    Family("prompt_tokens_cached", _C, "tokens",
           "Prompt tokens found in the prefix cache, and so not computed.", in_vllm=True),
    # The engine's step.
    Family("batch_size", _H, "choices", "Choices that computed in a step.", buckets=_BATCH),
    Family("iteration_tokens_total", _H, "tokens",
           "Prompt and completion tokens computed in a step.", buckets=_BUDGET, in_vllm=True),
    Family("iteration_duration_seconds", _H, "seconds", "Duration of a step.", buckets=_STEP),
    Family("engine_busy_seconds", _C, "seconds", "Time spent in steps: its rate is the engine's utilization."),
    # The service.
    Family("engine_state", _G, "1", "1 for the state that holds, 0 for the others.",
           ("state",), tuple((state,) for state in EngineState)),
    Family("startup_seconds", _G, "seconds", "Start of the worker to ready: model load and warm-up."),
    Family("worker_restarts", _C, "restarts", "Workers that died and were replaced.",
           ("reason",), (("signal",), ("exit",))),
    Family("requests_replayed", _C, "requests", "Requests a dead worker left unfinished, by what became of them.",
           ("outcome",), (("resubmitted",), ("gave_up",))),
    Family("requests_resumed", _C, "requests",
           "Connections that read an answer begun for an earlier one, by what they named it with.",
           ("by",), (("event_id",), ("key",))),
    Family("api_requests", _G, "requests", "Requests that the API process has taken in and not answered to the end."),
    Family("api_tasks", _G, "tasks", "asyncio tasks of the API process, this scrape's among them."),
    Family("serving_path", _G, "1",
           "1 for the code path that computes tokens. kernels: own (native) or pytorch; level: instructions of the "
           "native kernels.",
           ("kernels", "level", "attention", "matrices", "dtype", "device"), ()),
    Family("build_info", _G, "1", "Versions, in labels.",
           ("version", "python", "torch", "litserve"), ()),
)
# fmt: on

FAMILIES: Final[Mapping[str, Family]] = {family.name: family for family in _FAMILIES}
