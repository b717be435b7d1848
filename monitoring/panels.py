"""Rows, panels and queries of the Grafana dashboard.

The first row has the panels and titles of vLLM's dashboard, so that operators of vLLM recognize them. vLLM plots the
rate of a histogram's sum, which grows with the number of requests. These panels divide that rate by the rate of the
histogram's count, which gives a mean.
"""

from dataclasses import dataclass
from typing import Final

_QUANTILES: Final = (("P99", 0.99), ("P95", 0.95), ("P90", 0.9), ("P50", 0.5))


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL expression of a panel, and the legend of the lines that it draws."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Dashboard panel. `unit` is a Grafana unit name, and `kind` is a Grafana panel type."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 12


@dataclass(frozen=True, slots=True)
class Row:
    """Dashboard row: panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def _select(metric: str, **labels: str) -> str:
    """Return a PromQL selector of a metric for the dashboard's chosen model and these label values."""
    matchers = ", ".join(f'{label}="{value}"' for label, value in ({"model_name": "$model_name"} | labels).items())
    return f"{metric}{{{matchers}}}"


def _rate(counter: str, by: str = "", **labels: str) -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate({_select(counter, **labels)}[$__rate_interval]))"


def _increase(counter: str, by: str, window: str) -> str:
    return f"sum by ({by}) (increase({_select(counter)}[{window}]))"


def _mean(histogram: str) -> str:
    return f"{_rate(f'{histogram}_sum')} / {_rate(f'{histogram}_count')}"


def _quantile(histogram: str, quantile: float) -> str:
    return f"histogram_quantile({quantile}, {_rate(f'{histogram}_bucket', 'le')})"


def _distribution(title: str, description: str, histogram: str) -> Panel:
    """Return a panel with the quantiles and the mean of a histogram over time."""
    queries = [Query(_quantile(histogram, quantile), name) for name, quantile in _QUANTILES]
    return Panel(title, description, "s", (*queries, Query(_mean(histogram), "Mean")))


def _heatmap(title: str, description: str, histogram: str) -> Panel:
    """Return a heatmap of the observations in each bucket of a histogram over time."""
    query = Query(_increase(f"{histogram}_bucket", "le", "$__rate_interval"), "{{le}}")
    return Panel(title, description, "none", (query,), kind="heatmap")


ROWS: Final = (
    Row(
        "Requests and tokens",
        (
            _distribution(
                "E2E Request Latency",
                "Time from arrival of the request to the last token, for completions that ended with stop or length.",
                "llm_e2e_request_latency_seconds",
            ),
            Panel(
                "Token Throughput",
                "Prompt tokens and completion tokens processed per second.",
                "short",
                (
                    Query(_rate("llm_prompt_tokens_total"), "Prompt Tokens/Sec"),
                    Query(_rate("llm_generation_tokens_total"), "Generation Tokens/Sec"),
                ),
            ),
            _distribution(
                "Inter Token Latency",
                "Time between two consecutive tokens of a completion, measured as they leave the server.",
                "llm_inter_token_latency_seconds",
            ),
            Panel(
                "Scheduler State",
                "Running completions, the maximum number of running completions, and waiting completions.",
                "none",
                (
                    Query(f"sum({_select('llm_num_requests_running')})", "Num Running"),
                    Query(f"sum({_select('llm_max_num_requests_running')})", "Max Running"),
                    Query(f"sum({_select('llm_num_requests_waiting')})", "Num Waiting"),
                ),
            ),
            _distribution(
                "Time To First Token Latency",
                "Time from arrival of the request to the first token leaving the server, queue time included.",
                "llm_time_to_first_token_seconds",
            ),
            Panel(
                "Cache Utilization",
                "Fraction of KV-cache blocks in use.",
                "percentunit",
                (Query(f"max({_select('llm_kv_cache_usage_perc')})", "KV Cache Usage"),),
            ),
            _heatmap("Request Prompt Length", "Number of tokens per prompt.", "llm_request_prompt_tokens"),
            _heatmap("Request Generation Length", "Number of tokens per completion.", "llm_request_generation_tokens"),
            Panel(
                "Finish Reason",
                "Completions that ended per second, by finish reason.",
                "reqps",
                (Query(_rate("llm_request_success_total", "finished_reason"), "{{finished_reason}}"),),
            ),
            _distribution(
                "Queue Time",
                "Time from arrival of the request until the scheduler first runs it.",
                "llm_request_queue_time_seconds",
            ),
            Panel(
                "Requests Prefill and Decode Time",
                "Mean time that a completion spends in prefill, in decode, and in both.",
                "s",
                (
                    Query(_mean("llm_request_prefill_time_seconds"), "Prefill"),
                    Query(_mean("llm_request_decode_time_seconds"), "Decode"),
                    Query(_mean("llm_request_inference_time_seconds"), "Both"),
                ),
            ),
            Panel(
                "Max Generation Token in Sequence Group",
                "Mean max_tokens requested, and mean number of tokens generated, per completion.",
                "none",
                (
                    Query(_mean("llm_request_params_max_tokens"), "Requested"),
                    Query(_mean("llm_request_generation_tokens"), "Generated"),
                ),
            ),
        ),
    ),
    Row(
        "Objectives and goodput",
        (
            Panel(
                "Objective Attainment",
                "Fraction of completions that met each objective: first token, time per output token, and both.",
                "percentunit",
                (
                    Query(
                        f"{_rate('llm_slo_requests_total', 'slo', met='true')}"
                        f" / {_rate('llm_slo_requests_total', 'slo')}",
                        "{{slo}}",
                    ),
                ),
            ),
            Panel(
                "Goodput",
                "Completions per second, and completions per second that met both objectives.",
                "reqps",
                (
                    Query(_rate("llm_slo_requests_total", slo="all"), "All"),
                    Query(_rate("llm_slo_requests_total", slo="all", met="true"), "Good"),
                ),
            ),
            _distribution(
                "Time Per Output Token",
                "(End-to-end latency - time to first token) / (tokens - 1), per completion.",
                "llm_request_time_per_output_token_seconds",
            ),
            Panel(
                "Latency by Quantile, 5 Minutes",
                "95th percentiles over 5 minutes, as computed by the recording rules.",
                "s",
                tuple(
                    Query(_select(f"model:llm_{name}:quantile5m", quantile="0.95"), legend)
                    for name, legend in (
                        ("time_to_first_token_seconds", "First token"),
                        ("inter_token_latency_seconds", "Between tokens"),
                        ("request_time_per_output_token_seconds", "Per token"),
                        ("e2e_request_latency_seconds", "End to end"),
                    )
                ),
            ),
        ),
    ),
    Row(
        "Prefix cache",
        (
            Panel(
                "Prefix Cache Hit Ratio",
                "Fraction of the tokens looked up in the prefix cache that were found.",
                "percentunit",
                (Query(f"{_rate('llm_prefix_cache_hits_total')} / {_rate('llm_prefix_cache_queries_total')}", "Hits"),),
            ),
            Panel(
                "Prompt Tokens by Source",
                "Prompt tokens per second: found in the prefix cache, and computed.",
                "short",
                (
                    Query(_rate("llm_prompt_tokens_cached_total"), "Cached"),
                    Query(
                        f"{_rate('llm_prompt_tokens_total')} - {_rate('llm_prompt_tokens_cached_total')}", "Computed"
                    ),
                ),
            ),
        ),
    ),
    Row(
        "Admission",
        (
            Panel(
                "Rejections",
                "Requests rejected per second before any work was done, by reason.",
                "reqps",
                (Query(_rate("llm_admission_rejections_total", "reason"), "{{reason}}"),),
            ),
            Panel(
                "Failures",
                "Requests that failed per second, by HTTP status and error type.",
                "reqps",
                (Query(_rate("llm_request_failures_total", "status, error_type"), "{{status}} {{error_type}}"),),
            ),
        ),
    ),
    Row(
        "Reliability",
        (
            Panel(
                "Engine State",
                "Current state of the engine: starting, ready, restarting, stalled or draining.",
                "none",
                (Query(f"max by (state) ({_select('llm_engine_state')}) == 1", "{{state}}"),),
                kind="state-timeline",
            ),
            Panel(
                "Worker Restarts and Replays",
                "Worker restarts in the last hour by reason, and replays of their unfinished requests by outcome.",
                "none",
                (
                    Query(_increase("llm_worker_restarts_total", "reason", "1h"), "restart: {{reason}}"),
                    Query(_increase("llm_requests_replayed_total", "outcome", "1h"), "replay: {{outcome}}"),
                ),
            ),
            Panel(
                "Cancellations",
                "Requests cancelled per second because the client disconnected, by phase: waiting or running.",
                "reqps",
                (Query(_rate("llm_requests_cancelled_total", "phase"), "{{phase}}"),),
            ),
            Panel(
                "Wasted Tokens",
                "Completion tokens per second that were computed and not delivered to a client, by reason.",
                "short",
                (Query(_rate("llm_wasted_tokens_total", "reason"), "{{reason}}"),),
            ),
            Panel(
                "Non-Finite Sequences",
                "Completions per second that ended with an error because the model computed NaN or infinity.",
                "reqps",
                (Query(_rate("llm_non_finite_sequences_total"), "Sequences"),),
            ),
            Panel(
                "Start-up Time",
                "Time from start to ready of the most recent worker: model load and warm-up.",
                "s",
                (Query(f"max({_select('llm_startup_seconds')})", "Start-up"),),
                kind="stat",
                width=6,
            ),
            Panel(
                "Version",
                "Versions of kvasir, torch and LitServe.",
                "none",
                (Query(_select("llm_build_info"), "kvasir {{version}}, torch {{torch}}, litserve {{litserve}}"),),
                kind="stat",
                width=9,
            ),
            Panel(
                "KV Cache",
                "Number and size of the KV-cache's blocks, their dtype, and their device.",
                "none",
                (
                    Query(
                        _select("llm_cache_config_info"),
                        "{{num_gpu_blocks}} blocks of {{block_size}} tokens, {{cache_dtype}} on {{device}}",
                    ),
                ),
                kind="stat",
                width=9,
            ),
        ),
    ),
    Row(
        "Iteration",
        (
            _distribution("Iteration Duration", "Duration of an engine step.", "llm_iteration_duration_seconds"),
            Panel(
                "Engine Utilization",
                "Fraction of time that the engine spends in steps.",
                "percentunit",
                (Query(_rate("llm_engine_busy_seconds_total", "engine"), "engine {{engine}}"),),
            ),
            _heatmap("Batch Size", "Number of completions computed in a step.", "llm_batch_size"),
            _heatmap(
                "Iteration Tokens", "Prompt and completion tokens computed in a step.", "llm_iteration_tokens_total"
            ),
            Panel(
                "Preemptions",
                "Completions per second that were put back in the queue because no KV-cache block was free.",
                "short",
                (Query(_rate("llm_num_preemptions_total"), "Preemptions"),),
            ),
            Panel(
                "Steps",
                "Engine steps per second, and mean tokens per step.",
                "short",
                (
                    Query(_rate("llm_iteration_duration_seconds_count"), "Steps/Sec"),
                    Query(_mean("llm_iteration_tokens_total"), "Tokens/Step"),
                ),
            ),
            Panel(
                "Draft Acceptance",
                "Fraction of drafted tokens that were accepted. Empty unless speculative decoding is on.",
                "percentunit",
                (
                    Query(
                        f"{_rate('llm_spec_decode_num_accepted_tokens_total')} / "
                        f"{_rate('llm_spec_decode_num_draft_tokens_total')}",
                        "Accepted",
                    ),
                ),
            ),
        ),
    ),
)
