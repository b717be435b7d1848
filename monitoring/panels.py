"""What the dashboard shows: rows of panels, each with its queries.

The first row has the panels and titles of vLLM's dashboard, for people who know it. Where vLLM plots the rate of a
histogram's sum, which grows with the number of requests, ours divide by the rate of its count.
"""

from dataclasses import dataclass
from typing import Final

_QUANTILES: Final = (("P99", 0.99), ("P95", 0.95), ("P90", 0.9), ("P50", 0.5))


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression, and the name of its lines."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `unit` is Grafana's name for it; `kind` is a panel type of Grafana."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 12


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def _select(metric: str, **labels: str) -> str:
    """A metric of the chosen model, where its labels have these values."""
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
    """Quantiles and mean of a histogram over time."""
    queries = [Query(_quantile(histogram, quantile), name) for name, quantile in _QUANTILES]
    return Panel(title, description, "s", (*queries, Query(_mean(histogram), "Mean")))


def _heatmap(title: str, description: str, histogram: str) -> Panel:
    """How many observations fell into each bucket over time."""
    query = Query(_increase(f"{histogram}_bucket", "le", "$__rate_interval"), "{{le}}")
    return Panel(title, description, "none", (query,), kind="heatmap")


ROWS: Final = (
    Row(
        "Requests and tokens",
        (
            _distribution(
                "E2E Request Latency",
                "Arrival to last token, of completions that ended by themselves.",
                "llm_e2e_request_latency_seconds",
            ),
            Panel(
                "Token Throughput",
                "Tokens processed per second.",
                "short",
                (
                    Query(_rate("llm_prompt_tokens_total"), "Prompt Tokens/Sec"),
                    Query(_rate("llm_generation_tokens_total"), "Generation Tokens/Sec"),
                ),
            ),
            _distribution(
                "Inter Token Latency",
                "Time between two tokens, as they leave the server.",
                "llm_inter_token_latency_seconds",
            ),
            Panel(
                "Scheduler State",
                "Completions that compute, that may compute at once, and that wait for room.",
                "none",
                (
                    Query(f"sum({_select('llm_num_requests_running')})", "Num Running"),
                    Query(f"sum({_select('llm_max_num_requests_running')})", "Max Running"),
                    Query(f"sum({_select('llm_num_requests_waiting')})", "Num Waiting"),
                ),
            ),
            _distribution(
                "Time To First Token Latency",
                "Arrival to first token leaving the server, queue included.",
                "llm_time_to_first_token_seconds",
            ),
            Panel(
                "Cache Utilization",
                "Share of KV-cache blocks in use.",
                "percentunit",
                (Query(f"max({_select('llm_kv_cache_usage_perc')})", "KV Cache Usage"),),
            ),
            _heatmap("Request Prompt Length", "Tokens a prompt had.", "llm_request_prompt_tokens"),
            _heatmap("Request Generation Length", "Tokens a completion had.", "llm_request_generation_tokens"),
            Panel(
                "Finish Reason",
                "Why completions ended, per second.",
                "reqps",
                (Query(_rate("llm_request_success_total", "finished_reason"), "{{finished_reason}}"),),
            ),
            _distribution("Queue Time", "Arrival to first scheduled.", "llm_request_queue_time_seconds"),
            Panel(
                "Requests Prefill and Decode Time",
                "Mean time a completion spent in each phase.",
                "s",
                (
                    Query(_mean("llm_request_prefill_time_seconds"), "Prefill"),
                    Query(_mean("llm_request_decode_time_seconds"), "Decode"),
                    Query(_mean("llm_request_inference_time_seconds"), "Both"),
                ),
            ),
            Panel(
                "Max Generation Token in Sequence Group",
                "The max_tokens completions asked for, and what they got, on average.",
                "none",
                (
                    Query(_mean("llm_request_params_max_tokens"), "Asked for"),
                    Query(_mean("llm_request_generation_tokens"), "Got"),
                ),
            ),
        ),
    ),
    Row(
        "Objectives and goodput",
        (
            Panel(
                "Objective Attainment",
                "Share of completions that met each objective: first token, time per token, and both.",
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
                "Completions per second, and those of them that met both objectives.",
                "reqps",
                (
                    Query(_rate("llm_slo_requests_total", slo="all"), "All"),
                    Query(_rate("llm_slo_requests_total", slo="all", met="true"), "Good"),
                ),
            ),
            _distribution(
                "Time Per Output Token",
                "(End to end - time to first token) / (tokens - 1), of each completion.",
                "llm_request_time_per_output_token_seconds",
            ),
            Panel(
                "Latency by Quantile, 5 Minutes",
                "The recorded 95th percentiles that alerts and reports are made of.",
                "s",
                tuple(
                    Query(_select(f"model:llm_{name}:quantile5m", quantile="0.95"), legend)
                    for name, legend in (
                        ("time_to_first_token_seconds", "First token"),
                        ("inter_token_latency_seconds", "Between tokens"),
                        ("request_time_per_output_token_seconds", "Per token"),
                        ("e2e_request_latency_seconds", "Whole"),
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
                "Share of the looked-up tokens that were found.",
                "percentunit",
                (Query(f"{_rate('llm_prefix_cache_hits_total')} / {_rate('llm_prefix_cache_queries_total')}", "Hits"),),
            ),
            Panel(
                "Prompt Tokens by Source",
                "Prompt tokens per second that were found in the cache, and that had to be computed.",
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
                "Requests refused before any work was done, per second.",
                "reqps",
                (Query(_rate("llm_admission_rejections_total", "reason"), "{{reason}}"),),
            ),
            Panel(
                "Failures",
                "Requests answered with an error, per second.",
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
                "The state that holds.",
                "none",
                (Query(f"max by (state) ({_select('llm_engine_state')}) == 1", "{{state}}"),),
                kind="state-timeline",
            ),
            Panel(
                "Worker Restarts and Replays",
                "Workers that died, and the requests they left, within an hour.",
                "none",
                (
                    Query(_increase("llm_worker_restarts_total", "reason", "1h"), "restart: {{reason}}"),
                    Query(_increase("llm_requests_replayed_total", "outcome", "1h"), "replay: {{outcome}}"),
                ),
            ),
            Panel(
                "Cancellations",
                "Requests whose client left, per second, by what they were doing.",
                "reqps",
                (Query(_rate("llm_requests_cancelled_total", "phase"), "{{phase}}"),),
            ),
            Panel(
                "Wasted Tokens",
                "Tokens per second that were computed for nobody.",
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
                "Start of the newest worker to ready.",
                "s",
                (Query(f"max({_select('llm_startup_seconds')})", "Start-up"),),
                kind="stat",
                width=6,
            ),
            Panel(
                "Version",
                "What runs.",
                "none",
                (Query(_select("llm_build_info"), "kvasir {{version}}, torch {{torch}}, litserve {{litserve}}"),),
                kind="stat",
                width=9,
            ),
            Panel(
                "KV Cache",
                "Its shape.",
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
            _distribution(
                "Iteration Duration", "How long a step of the engine takes.", "llm_iteration_duration_seconds"
            ),
            Panel(
                "Engine Utilization",
                "Share of time spent in steps.",
                "percentunit",
                (Query(_rate("llm_engine_busy_seconds_total", "engine"), "engine {{engine}}"),),
            ),
            _heatmap("Batch Size", "Completions that computed in a step.", "llm_batch_size"),
            _heatmap(
                "Iteration Tokens", "Prompt and completion tokens computed in a step.", "llm_iteration_tokens_total"
            ),
            Panel(
                "Preemptions",
                "Completions put back in the queue for want of KV blocks, per second.",
                "short",
                (Query(_rate("llm_num_preemptions_total"), "Preemptions"),),
            ),
            Panel(
                "Steps",
                "Steps per second, and tokens a step.",
                "short",
                (
                    Query(_rate("llm_iteration_duration_seconds_count"), "Steps/Sec"),
                    Query(_mean("llm_iteration_tokens_total"), "Tokens/Step"),
                ),
            ),
            Panel(
                "Draft Acceptance",
                "Share of the drafted tokens that were drawn (speculative decoding, where it is on).",
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
