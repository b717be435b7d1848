"""Rows, panels and queries of the two Grafana dashboards: one service, and a fleet of replicas.

A panel's title says what is shown, its description how to read it. Where vLLM's dashboard plots the rate of a
histogram's sum, which grows with the number of requests, these panels plot quantiles and means.
"""

from dataclasses import dataclass
from typing import Final

# Units that Grafana lacks, in its form for custom units.
_TOKENS: Final = "suffix:tokens"
_TOKENS_A_SECOND: Final = "suffix:tokens/s"
_CHOICES: Final = "suffix:choices"
_CHOICES_A_SECOND: Final = "suffix:choices/s"

_QUANTILES: Final = (("P99", 0.99), ("P95", 0.95), ("P90", 0.9), ("P50", 0.5))
_QUANTILE_COLORS: Final = (("P99", "red"), ("P95", "orange"), ("P90", "yellow"), ("P50", "green"), ("Mean", "blue"))


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL expression of a panel, the legend of the lines that it draws, and if it also draws exemplars."""

    expr: str
    legend: str
    has_exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """Dashboard panel.

    Attributes:
        unit: Grafana's name of a unit.
        kind: Grafana's name of a panel type.
        thresholds: colours from a value on, in addition to green below the first.
        colors: colour of each line, row or text with this legend, instead of Grafana's.
        max: end of the axis; None: Grafana chooses.
        none: text of a panel without data.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 12
    height: int = 8
    thresholds: tuple[tuple[float, str], ...] = ()
    colors: tuple[tuple[str, str], ...] = ()
    max: float | None = None
    decimals: int | None = None
    none: str = "none"


@dataclass(frozen=True, slots=True)
class Row:
    """Dashboard row: panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


_FULL: Final = ((0.8, "yellow"), (0.95, "red"))  # thresholds of a resource
_ON_TIME: Final = ((0.0, "red"), (0.95, "green"))  # thresholds of an objective
_ANY: Final = ((1.0, "red"),)  # threshold of a count that should be 0
_ALWAYS_RED: Final = ((0.0, "red"),)
_INFO: Final = ((0.0, "text"),)  # neither good nor bad
_STATES: Final = (
    ("ready", "green"),
    ("starting", "blue"),
    ("restarting", "yellow"),
    ("draining", "purple"),
    ("stalled", "red"),
)


def _select(metric: str, **labels: str) -> str:
    """Return a PromQL selector of a metric for the dashboard's chosen model and these label values."""
    matchers = ", ".join(f'{label}="{value}"' for label, value in ({"model_name": "$model_name"} | labels).items())
    return f"{metric}{{{matchers}}}"


def _sum(expr: str, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}({expr})"


def _rate(counter: str, by: str = "", *, window: str = "$__rate_interval", **labels: str) -> str:
    return _sum(f"rate({_select(counter, **labels)}[{window}])", by)


def _mean_of_minute(gauge: str) -> str:
    return _sum(f"avg_over_time({_select(gauge)}[1m])")


def _increase(counter: str, by: str, window: str) -> str:
    """Return the increase of a counter as a whole number: Prometheus extrapolates it to a fraction."""
    return f"round({_sum(f'increase({_select(counter)}[{window}])', by)})"


def _mean(histogram: str) -> str:
    return f"{_rate(f'{histogram}_sum')} / {_rate(f'{histogram}_count')}"


def _quantile(histogram: str, quantile: float, by: str = "le") -> str:
    return f"histogram_quantile({quantile}, {_rate(f'{histogram}_bucket', by)})"


def _on_time(slo: str, window: str = "$__rate_interval") -> str:
    met = _rate("llm_slo_requests_total", window=window, slo=slo, met="true")
    return f"{met} / ({_rate('llm_slo_requests_total', window=window, slo=slo)} > 0)"


def _distribution(
    title: str, description: str, histogram: str, *, objective: float | None = None, width: int = 12
) -> Panel:
    """Return a panel with the quantiles and the mean of a histogram over time, and a line at the objective."""
    queries = [Query(_quantile(histogram, quantile), name, name == "P99") for name, quantile in _QUANTILES]
    thresholds = () if objective is None else ((objective, "red"),)
    queries.append(Query(_mean(histogram), "Mean"))
    return Panel(title, description, "s", tuple(queries), thresholds=thresholds, width=width, colors=_QUANTILE_COLORS)


def _heatmap(title: str, description: str, histogram: str, unit: str) -> Panel:
    """Return a heatmap of the observations in each bucket of a histogram over time."""
    query = Query(_sum(f"increase({_select(f'{histogram}_bucket')}[$__rate_interval])", "le"), "{{le}}")
    return Panel(title, description, unit, (query,), kind="heatmap")


def _number(title: str, description: str, unit: str, expr: str, **looks: object) -> Panel:
    """Return a panel with one large number."""
    looks = {"kind": "stat", "width": 4, "height": 4, **looks}
    return Panel(title, description, unit, (Query(expr, title),), **looks)  # type: ignore[arg-type]


_OVERVIEW: Final = Row(
    "Overview",
    (
        Panel(
            "State",
            "State of the service: starting, ready, restarting (a worker died), stalled (a worker hangs) or draining.",
            "none",
            (Query(f"max by (state) ({_select('llm_engine_state')}) == 1", "{{state}}"),),
            kind="stat",
            width=4,
            height=4,
            colors=_STATES,
            none="no scrape",
        ),
        _number(
            "First tokens on time",
            "Completions of the last 5 minutes whose first token came within 0.5 s. Good: 95 % and more.",
            "percentunit",
            _on_time("ttft", "5m"),
            thresholds=_ON_TIME,
            none="no requests",
        ),
        _number(
            "Tokens on time",
            "Completions of the last 5 minutes with at most 50 ms per token after the first. Good: 95 % and more.",
            "percentunit",
            _on_time("tpot", "5m"),
            thresholds=_ON_TIME,
            none="no requests",
        ),
        _number(
            "Requests that fail",
            "Share of the requests of the last 5 minutes that got a 5xx, or were rejected with a 429 or 503.",
            "percentunit",
            f"{_sum(_select('model:llm_request_errors:ratio5m'))} + "
            f"{_sum(_select('model:llm_admission_rejections:ratio5m'))}",
            thresholds=((0.01, "yellow"), (0.05, "red")),
            none="no requests",
        ),
        _number(
            "Workers replaced, 24 h",
            "Workers that died and were replaced in the last 24 hours. Running requests continued after a pause.",
            "short",
            f"round(sum(increase({_select('llm_worker_restarts_total')}[24h])))",
            thresholds=_ANY,
            decimals=0,
        ),
        _number(
            "Slower paths in use",
            "Slower computation paths in use, because faster ones are not available; GET /ready names them.",
            "short",
            f"max({_select('llm_fallbacks')})",
            thresholds=((1, "yellow"),),
            decimals=0,
        ),
        Panel(
            "What is full",
            "The limit that the service reaches first: the engine's time, its running choices, or its KV-cache. "
            "Means of the last minute. A queue grows only when one of them is full.",
            "percentunit",
            (
                Query(_rate("llm_engine_busy_seconds_total", window="1m"), "Engine"),
                Query(
                    f"{_mean_of_minute('llm_num_requests_running')} / {_sum(_select('llm_max_num_requests_running'))}",
                    "Running",
                ),
                Query(f"max(avg_over_time({_select('llm_kv_cache_usage_perc')}[1m]))", "KV-cache"),
            ),
            kind="bargauge",
            width=8,
            height=6,
            thresholds=_FULL,
            max=1,
        ),
        _number(
            "Throughput",
            "Completion tokens per second.",
            _TOKENS_A_SECOND,
            _rate("llm_generation_tokens_total"),
            thresholds=_INFO,
            height=6,
        ),
        _number(
            "Waiting",
            "Choices in the queue.",
            _CHOICES,
            _sum(_select("llm_num_requests_waiting")),
            thresholds=_INFO,
            height=6,
        ),
        Panel(
            "Alerts that fire",
            "Alerts of monitoring/rules/alerts.yml that fire. docs/monitoring.md has a section for each.",
            "none",
            (Query('max by (alertname) (ALERTS{model_name=~"$model_name|", alertstate="firing"})', "{{alertname}}"),),
            kind="state-timeline",
            width=8,
            height=6,
            thresholds=_ALWAYS_RED,
        ),
    ),
)

_LATENCY: Final = Row(
    "Latency",
    (
        _distribution(
            "Time to first token",
            "From arrival of the request to the first token leaving the server, queue included. Objective: 0.5 s.",
            "llm_time_to_first_token_seconds",
            objective=0.5,
        ),
        _distribution(
            "Inter-token latency",
            "Between two consecutive tokens of a completion, as they leave the server.",
            "llm_inter_token_latency_seconds",
        ),
        _distribution(
            "Time per output token",
            "(End-to-end latency - time to first token) / (tokens - 1), per completion. Objective: 50 ms.",
            "llm_request_time_per_output_token_seconds",
            objective=0.05,
        ),
        _distribution(
            "End-to-end latency",
            "From arrival of the request to the last token, of completions that ended with stop or length.",
            "llm_e2e_request_latency_seconds",
        ),
        Panel(
            "Where the time goes",
            "Mean time of a completion in the queue, in prefill (until the first token) and in decode (after it).",
            "s",
            (
                Query(_mean("llm_request_queue_time_seconds"), "Queue"),
                Query(_mean("llm_request_prefill_time_seconds"), "Prefill"),
                Query(_mean("llm_request_decode_time_seconds"), "Decode"),
            ),
        ),
        Panel(
            "Objectives met",
            "Share of completions with a first token within 0.5 s, at most 50 ms per further token, and both.",
            "percentunit",
            (
                Query(_on_time("ttft"), "First token"),
                Query(_on_time("tpot"), "Each token"),
                Query(_on_time("all"), "Both"),
            ),
            thresholds=_ON_TIME,
            max=1,
            none="no requests",
        ),
    ),
)

_THROUGHPUT: Final = Row(
    "Throughput",
    (
        Panel(
            "Tokens per second",
            "Prompt tokens computed, prompt tokens found in the prefix cache, and completion tokens.",
            _TOKENS_A_SECOND,
            (
                Query(_rate("llm_generation_tokens_total"), "Completion"),
                Query(
                    f"{_rate('llm_prompt_tokens_total')} - {_rate('llm_prompt_tokens_cached_total')}",
                    "Prompt, computed",
                ),
                Query(_rate("llm_prompt_tokens_cached_total"), "Prompt, cached"),
            ),
        ),
        Panel(
            "Completions per second, by finish reason",
            "Choices that ended: stop (end of text or stop sequence), length (max_tokens), abort (client left), error.",
            _CHOICES_A_SECOND,
            (Query(_rate("llm_request_success_total", "finished_reason"), "{{finished_reason}}"),),
            colors=(
                ("stop", "green"),
                ("length", "blue"),
                ("abort", "yellow"),
                ("error", "red"),
                ("refused", "orange"),
            ),
        ),
        Panel(
            "Goodput",
            "Completions per second, and those of them that met both objectives.",
            _CHOICES_A_SECOND,
            (
                Query(_rate("llm_slo_requests_total", slo="all"), "All"),
                Query(_rate("llm_slo_requests_total", slo="all", met="true"), "Met both objectives"),
            ),
        ),
        Panel(
            "Completion length, asked and generated",
            "Mean max_tokens of the requests, and mean number of tokens generated, per choice.",
            _TOKENS,
            (
                Query(_mean("llm_request_params_max_tokens"), "max_tokens"),
                Query(_mean("llm_request_generation_tokens"), "Generated"),
            ),
        ),
        _heatmap("Prompt length", "Number of tokens per prompt.", "llm_request_prompt_tokens", _TOKENS),
        _heatmap("Completion length", "Number of tokens per completion.", "llm_request_generation_tokens", _TOKENS),
    ),
)

_QUEUE: Final = Row(
    "Queue",
    (
        Panel(
            "Running and waiting choices",
            "Running choices, their limit (--max-num-running, or lower to meet --target-itl-ms), and the queue.",
            _CHOICES,
            (
                Query(_sum(_select("llm_num_requests_running")), "Running"),
                Query(_sum(_select("llm_max_num_requests_running")), "Limit"),
                Query(_sum(_select("llm_num_requests_waiting")), "Waiting"),
            ),
        ),
        _distribution(
            "Queue time",
            "From arrival of the request until the scheduler first runs it.",
            "llm_request_queue_time_seconds",
        ),
        Panel(
            "Rejected requests per second",
            "Requests rejected before any work was done for them, by reason.",
            "reqps",
            (Query(_rate("llm_admission_rejections_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Requests in the API process",
            "Requests admitted and not completed, and asyncio tasks of the API process.",
            "short",
            (
                Query(_sum(_select("llm_api_requests")), "Requests"),
                Query(_sum(_select("llm_api_tasks")), "asyncio tasks"),
            ),
        ),
    ),
)

_CACHE: Final = Row(
    "KV-cache",
    (
        Panel(
            "KV-cache in use",
            "Share of KV-cache blocks in use. At 100 % new choices wait, and running ones may be preempted.",
            "percentunit",
            (Query(f"max({_select('llm_kv_cache_usage_perc')})", "Blocks in use"),),
            thresholds=_FULL,
            max=1,
        ),
        Panel(
            "Prefix cache hits",
            "Share of the prompt tokens looked up in the prefix cache that were found, and need no prefill.",
            "percentunit",
            (
                Query(
                    f"{_rate('llm_prefix_cache_hits_total')} / ({_rate('llm_prefix_cache_queries_total')} > 0)",
                    "Tokens found",
                ),
            ),
            max=1,
            none="no prompts",
        ),
        Panel(
            "Preemptions per second",
            "Choices put back in the queue because no KV-cache block was free. They are computed again.",
            _CHOICES_A_SECOND,
            (Query(_rate("llm_num_preemptions_total"), "Preempted"),),
        ),
        Panel(
            "KV-cache size",
            "Number and size of the KV-cache's blocks, their dtype, and their device.",
            "none",
            (
                Query(
                    _select("llm_cache_config_info"),
                    "{{num_gpu_blocks}} blocks of {{block_size}} tokens, {{cache_dtype}} on {{device}}",
                ),
            ),
            kind="stat",
            thresholds=_INFO,
        ),
    ),
)

_ENGINE: Final = Row(
    "Engine",
    (
        _distribution("Duration of a step", "Duration of an engine step.", "llm_iteration_duration_seconds"),
        Panel(
            "Engine busy",
            "Share of time that the engine spends in steps. At 100 % more load only makes the queue longer.",
            "percentunit",
            (Query(_rate("llm_engine_busy_seconds_total", "engine"), "engine {{engine}}"),),
            thresholds=_FULL,
            max=1,
        ),
        _heatmap("Choices per step", "Number of choices computed in a step.", "llm_batch_size", _CHOICES),
        _heatmap(
            "Tokens per step",
            "Prompt and completion tokens computed in a step.",
            "llm_iteration_tokens_total",
            _TOKENS,
        ),
        Panel(
            "Steps per second",
            "Engine steps per second.",
            "suffix:steps/s",
            (Query(_rate("llm_iteration_duration_seconds_count"), "Steps"),),
        ),
        Panel(
            "Drafts accepted",
            "Share of drafted tokens that were accepted. No data while speculative decoding is off.",
            "percentunit",
            (
                Query(
                    f"{_rate('llm_spec_decode_num_accepted_tokens_total')} / "
                    f"({_rate('llm_spec_decode_num_draft_tokens_total')} > 0)",
                    "Accepted",
                ),
            ),
            max=1,
            none="no drafts: speculative decoding is off",
        ),
    ),
)

_ERRORS: Final = Row(
    "Errors",
    (
        Panel(
            "Failed requests per second",
            "Requests that ended with an error response, by HTTP status.",
            "reqps",
            (Query(f"{_rate('llm_request_failures_total', 'status')} > 0", "{{status}}"),),
        ),
        Panel(
            "State over time",
            "State of the service: starting, ready, restarting, stalled or draining.",
            "none",
            (Query(f"max by (state) ({_select('llm_engine_state')}) == 1", "{{state}}"),),
            kind="state-timeline",
            colors=_STATES,
        ),
        Panel(
            "Worker deaths in the last hour",
            "Workers that died and were replaced, by reason, and what became of their unfinished requests.",
            "short",
            (
                Query(_increase("llm_worker_restarts_total", "reason", "1h"), "Workers: {{reason}}"),
                Query(_increase("llm_requests_replayed_total", "outcome", "1h"), "Requests: {{outcome}}"),
            ),
            decimals=0,
        ),
        Panel(
            "Cancelled requests per second",
            "Requests whose client disconnected, by phase: waiting or running.",
            "reqps",
            (Query(_rate("llm_requests_cancelled_total", "phase"), "{{phase}}"),),
        ),
        Panel(
            "Wasted tokens per second",
            "Completion tokens that were computed and not delivered to a client, by reason.",
            _TOKENS_A_SECOND,
            (Query(_rate("llm_wasted_tokens_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Choices with NaN or infinity",
            "Choices per second that ended with an error because the model computed NaN or infinity.",
            _CHOICES_A_SECOND,
            (Query(_rate("llm_non_finite_sequences_total"), "Choices"),),
        ),
    ),
)

_RESOURCES: Final = Row(
    "Resources",
    (
        Panel(
            "Memory of each process",
            "Resident memory. Mapped weights count in each process that reads them.",
            "bytes",
            (Query(_sum(_select("llm_process_resident_memory_bytes"), "process"), "{{process}}"),),
        ),
        Panel(
            "CPU of each process",
            "Cores in use: 1 is one core.",
            "suffix:cores",
            (Query(_rate("llm_process_cpu_seconds_total", "process"), "{{process}}"),),
            decimals=2,
        ),
        Panel(
            "Duration of the last start",
            "From the most recent worker's start to ready: model load and warm-up.",
            "s",
            (Query(f"max({_select('llm_startup_seconds')})", "Start"),),
            kind="stat",
            thresholds=_INFO,
            height=4,
        ),
        Panel(
            "Version",
            "Versions of kvasir, torch and LitServe.",
            "none",
            (Query(_select("llm_build_info"), "kvasir {{version}}, torch {{torch}}, litserve {{litserve}}"),),
            kind="stat",
            thresholds=_INFO,
            height=4,
        ),
    ),
)

ROWS: Final = (_OVERVIEW, _LATENCY, _THROUGHPUT, _QUEUE, _CACHE, _ENGINE, _ERRORS, _RESOURCES)


def _of_each(metric: str) -> str:
    return _sum(_select(metric), "instance")


FLEET_ROWS: Final = (
    Row(
        "Replicas",
        (
            Panel(
                "Replicas by state",
                "Number of replicas in each state.",
                "short",
                (Query(f"{_sum(_select('llm_engine_state'), 'state')} > 0", "{{state}}"),),
                decimals=0,
                width=8,
                colors=_STATES,
            ),
            Panel(
                "Replicas that are not ready",
                "Replicas in a state other than ready.",
                "none",
                (
                    Query(
                        f"max by (instance) ({_select('llm_engine_state', state='ready')}) == 0",
                        "{{instance}}",
                    ),
                ),
                kind="state-timeline",
                width=8,
                thresholds=_ALWAYS_RED,
            ),
            Panel(
                "Alerts that fire",
                "Alerts of all replicas of this model.",
                "none",
                (
                    Query(
                        'count by (alertname) (ALERTS{model_name=~"$model_name|", alertstate="firing"})',
                        "{{alertname}}",
                    ),
                ),
                kind="state-timeline",
                width=8,
                thresholds=_ALWAYS_RED,
            ),
            Panel(
                "Completion tokens per second",
                "Of each replica. Equal lines mean an even distribution of the load.",
                _TOKENS_A_SECOND,
                (Query(_rate("llm_generation_tokens_total", "instance"), "{{instance}}"),),
            ),
            Panel(
                "Waiting choices",
                "Queue of each replica. One long queue beside empty ones means that the router does not balance.",
                _CHOICES,
                (Query(_of_each("llm_num_requests_waiting"), "{{instance}}"),),
            ),
            Panel(
                "Time to first token, P95",
                "Of each replica, queue included. Objective: 0.5 s.",
                "s",
                (Query(_quantile("llm_time_to_first_token_seconds", 0.95, "instance, le"), "{{instance}}"),),
                thresholds=((0.5, "red"),),
            ),
            Panel(
                "Inter-token latency, P95",
                "Of each replica.",
                "s",
                (Query(_quantile("llm_inter_token_latency_seconds", 0.95, "instance, le"), "{{instance}}"),),
            ),
            Panel(
                "Prefix cache hits",
                "Share of prompt tokens found, of each replica. A router without prefix affinity lowers all lines.",
                "percentunit",
                (
                    Query(
                        f"{_rate('llm_prefix_cache_hits_total', 'instance')} / "
                        f"({_rate('llm_prefix_cache_queries_total', 'instance')} > 0)",
                        "{{instance}}",
                    ),
                ),
                max=1,
                none="no prompts",
            ),
            Panel(
                "KV-cache in use",
                "Share of KV-cache blocks in use, of each replica.",
                "percentunit",
                (Query(f"max by (instance) ({_select('llm_kv_cache_usage_perc')})", "{{instance}}"),),
                thresholds=_FULL,
                max=1,
            ),
            Panel(
                "Rejected requests per second",
                "Of each replica.",
                "reqps",
                (Query(_rate("llm_admission_rejections_total", "instance"), "{{instance}}"),),
            ),
            Panel(
                "Workers replaced in the last hour",
                "Of each replica.",
                "short",
                (Query(_increase("llm_worker_restarts_total", "instance", "1h"), "{{instance}}"),),
                decimals=0,
            ),
        ),
    ),
)
