"""Each observation changes exactly its metrics, under Kvasir's names and vLLM's."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from service.ipc.messages import EngineIdle, FinishReason
from service.metrics.definitions import COMMON_LABELS, FAMILIES, PREFIX, VLLM_PREFIX, Kind
from service.metrics.recorder import TPOT_OBJECTIVE_SECONDS, TTFT_OBJECTIVE_SECONDS, EngineState, Metrics
from service.protocol import errors
from tests.ops.observations import HELLO, MODEL, OBSERVATIONS, STEP, Observation, finished, observe_everything, scrape

# https://docs.vllm.ai/en/stable/usage/metrics/, limited to the metrics that Kvasir has.
VLLM_FAMILIES = {
    "lora_requests_info",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
    "request_success",
    "admission_rejections",
    "num_requests_running",
    "num_requests_waiting",
    "num_preemptions",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "prompt_tokens",
    "generation_tokens",
    "prompt_tokens_cached",
    "kv_cache_usage_perc",
    "cache_config_info",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "iteration_tokens_total",
}

# Of the histogram whose values may be negative.
COUNT_BUCKET = 'retry_after_error_seconds_bucket{le="+Inf"}'


def changes(metrics: Metrics, before: dict[str, float]) -> dict[str, float]:
    """Return the samples that changed, except buckets of histograms with a count."""
    after = {name: value for name, value in scrape(metrics).items() if "_bucket{" not in name or name == COUNT_BUCKET}
    deltas = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: delta for name, delta in deltas.items() if delta}


@pytest.mark.parametrize("observation", OBSERVATIONS, ids=lambda observation: str(observation.name))
def test_an_observation_changes_its_samples_and_no_other(metrics: Metrics, observation: Observation) -> None:
    before = scrape(metrics)
    observation.make(metrics)
    assert changes(metrics, before) == pytest.approx(observation.changes)


def test_every_metric_family_is_changed_by_an_observation(metrics: Metrics) -> None:
    nothing: dict[str, float] = {}
    observe_everything(metrics)
    moved = {name.partition("{")[0] for name in changes(metrics, nothing)}
    expected = set()
    for family in FAMILIES.values():
        name = family.exposed_name.removeprefix(PREFIX)
        expected |= {f"{name}_count", f"{name}_sum"} if family.kind is Kind.HISTOGRAM else {name}
    without_count = COUNT_BUCKET.partition("_bucket")[0]
    expected = expected - {f"{without_count}_count", f"{without_count}_sum"} | {f"{without_count}_bucket"}
    assert moved == expected


def test_the_strict_parser_of_openmetrics_accepts_all_metrics(metrics: Metrics) -> None:
    observe_everything(metrics)
    metrics.set_exemplar("time_to_first_token_seconds", 0.25, "0af7651916cd43dd8448eb211c80319c")
    text = metrics.render("application/openmetrics-text")[0].decode()
    read = {family.name for family in openmetrics.text_string_to_metric_families(text)}
    assert read == {PREFIX + name for name in FAMILIES} | {VLLM_PREFIX + name for name in VLLM_FAMILIES}


def test_build_info_has_the_versions(metrics: Metrics) -> None:
    version, torch, litserve = map(importlib.metadata.version, ("kvasir", "torch", "litserve"))
    labels = f'litserve="{litserve}",python="{platform.python_version()}",torch="{torch}",version="{version}"'
    assert scrape(metrics)[f"build_info{{{labels}}}"] == 1


def test_counters_with_known_labels_begin_at_zero(metrics: Metrics) -> None:
    samples = scrape(metrics)
    for name in (
        'admission_rejections_total{reason="draining"}',
        'request_success_total{finished_reason="error"}',
        'requests_cancelled_total{phase="waiting"}',
        'slo_requests_total{met="false",slo="all"}',
        'worker_restarts_total{reason="exit"}',
        "num_preemptions_total",
    ):
        assert samples[name] == 0


def test_a_histogram_bound_includes_an_equal_value(metrics: Metrics) -> None:
    metrics.observe("time_to_first_token_seconds", 0.25)
    samples = scrape(metrics)
    assert samples['time_to_first_token_seconds_bucket{le="0.16"}'] == 0
    assert samples['time_to_first_token_seconds_bucket{le="0.25"}'] == 1
    assert samples['time_to_first_token_seconds_bucket{le="+Inf"}'] == 1


def test_bounds_ascend_and_hold_the_objectives() -> None:
    for family in FAMILIES.values():
        assert list(family.buckets) == sorted(set(family.buckets))
        assert bool(family.buckets) == (family.kind is Kind.HISTOGRAM)
    assert TTFT_OBJECTIVE_SECONDS in FAMILIES["time_to_first_token_seconds"].buckets
    assert TPOT_OBJECTIVE_SECONDS in FAMILIES["request_time_per_output_token_seconds"].buckets


def test_a_step_without_prompts_leaves_the_prompt_counters(metrics: Metrics) -> None:
    metrics.observe_engine(STEP)
    before = scrape(metrics)
    metrics.observe_engine(
        msgspec.structs.replace(
            STEP,
            batch_size=3,
            num_prompt_tokens=0,
            num_cached_prompt_tokens=0,
            num_prefix_queries=0,
            num_prefix_hits=0,
            num_preemptions=0,
            num_drafts=0,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            step_seconds=0.03125,
            num_non_finite=0,
        )
    )
    assert changes(metrics, before) == {
        "generation_tokens_total": 3,
        "engine_busy_seconds_total": 0.03125,
        'worker_busy_seconds_total{worker="0"}': 0.03125,
        "batch_size_count": 1,
        "batch_size_sum": 3,
        "iteration_tokens_total_count": 1,
        "iteration_tokens_total_sum": 3,
        "iteration_duration_seconds_count": 1,
        "iteration_duration_seconds_sum": 0.03125,
    }


def test_an_idle_engine_reports_no_load_and_keeps_its_limit(metrics: Metrics) -> None:
    metrics.observe_engine(STEP)
    metrics.observe_engine(EngineIdle())
    samples = scrape(metrics)
    assert [samples[f"num_requests_{state}"] for state in ("running", "waiting")] == [0, 0]
    assert samples["kv_cache_usage_perc"] == 0
    assert samples["max_num_requests_running"] == STEP.max_num_running


def test_numbers_of_several_workers_are_summed_until_a_worker_dies() -> None:
    metrics = Metrics(MODEL, 2)
    for worker in (0, 1):
        metrics.observe_worker_start(HELLO, worker)
        metrics.observe_engine(STEP, worker)
    samples = scrape(metrics)
    assert [samples[f"num_requests_{state}"] for state in ("running", "waiting")] == [6, 4]
    assert samples["max_num_requests_running"] == 2 * STEP.max_num_running
    assert samples["kv_cache_usage_perc"] == STEP.kv_usage
    assert samples['cache_config_info{block_size="16",cache_dtype="float16",device="cpu",num_gpu_blocks="128"}'] == 1
    assert samples["generation_tokens_total"] == 2 * STEP.num_completion_tokens
    busy_seconds = [samples[f'worker_busy_seconds_total{{worker="{worker}"}}'] for worker in (0, 1)]
    assert [samples["engine_busy_seconds_total"], *busy_seconds] == [STEP.step_seconds] * 3
    metrics.forget_engine(0)
    assert scrape(metrics)["num_requests_running"] == STEP.num_running
    metrics.forget_engine(1)
    assert "num_requests_running" not in scrape(metrics)


@pytest.mark.parametrize(
    ("num_completion_tokens", "ttft_seconds"), [(1, 0.5), (0, None)], ids=["one token", "no token"]
)
def test_time_per_output_token_needs_two_tokens(
    metrics: Metrics, num_completion_tokens: int, ttft_seconds: float | None
) -> None:
    finished(metrics, num_completion_tokens=num_completion_tokens, ttft_seconds=ttft_seconds)
    samples = scrape(metrics)
    assert samples["request_time_per_output_token_seconds_count"] == 0
    assert samples["e2e_request_latency_seconds_count"] == 1
    assert samples['slo_requests_total{met="true",slo="all"}'] == 1


@pytest.mark.parametrize(
    ("ttft_seconds", "e2e_seconds", "met"),
    [
        (0.5, 0.75, {"ttft": True, "tpot": True, "all": True}),
        (0.75, 1.0, {"ttft": False, "tpot": True, "all": False}),
        (0.25, 1.25, {"ttft": True, "tpot": False, "all": False}),
    ],
    ids=["good", "late", "slow"],
)
def test_choices_are_counted_by_objective_met_or_missed(
    metrics: Metrics, ttft_seconds: float, e2e_seconds: float, met: dict[str, bool]
) -> None:
    finished(metrics, ttft_seconds=ttft_seconds, e2e_seconds=e2e_seconds)
    samples = scrape(metrics)
    for slo, is_met in met.items():
        assert samples[f'slo_requests_total{{met="true",slo="{slo}"}}'] == is_met
        assert samples[f'slo_requests_total{{met="false",slo="{slo}"}}'] == (not is_met)


def test_a_failed_choice_meets_no_objective_and_has_no_latency(metrics: Metrics) -> None:
    before = scrape(metrics)
    finished(metrics, FinishReason.ERROR)
    assert changes(metrics, before) == {
        'request_success_total{finished_reason="error"}': 1,
        'slo_requests_total{met="false",slo="ttft"}': 1,
        'slo_requests_total{met="false",slo="tpot"}': 1,
        'slo_requests_total{met="false",slo="all"}': 1,
    }


def test_an_aborted_choice_is_counted_and_nothing_else(metrics: Metrics) -> None:
    before = scrape(metrics)
    finished(metrics, FinishReason.ABORT)
    assert changes(metrics, before) == {'request_success_total{finished_reason="abort"}': 1}


def test_exactly_one_engine_state_is_set(metrics: Metrics) -> None:
    for state in EngineState:
        metrics.set_engine_state(state)
        samples = scrape(metrics)
        assert {other: samples[f'engine_state{{state="{other}"}}'] for other in EngineState} == {
            other: float(other is state) for other in EngineState
        }


def test_vllm_names_carry_the_same_values(metrics: Metrics) -> None:
    assert {name for name, family in FAMILIES.items() if family.in_vllm} == VLLM_FAMILIES
    observe_everything(metrics)
    ours, theirs = scrape(metrics, PREFIX), scrape(metrics, VLLM_PREFIX)
    shared = {FAMILIES[name].exposed_name.removeprefix(PREFIX) for name in VLLM_FAMILIES}

    def is_shared(sample: str) -> bool:
        name = sample.partition("{")[0]
        return name in shared or any(name == f"{base}_{end}" for base in shared for end in ("bucket", "sum", "count"))

    assert theirs == {name: value for name, value in ours.items() if is_shared(name)}


def test_the_exposition_is_well_formed(metrics: Metrics) -> None:
    observe_everything(metrics)
    body, content_type = metrics.render()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert len(families) == len(FAMILIES) + len(VLLM_FAMILIES)
    for name, exposed in families.items():
        family = FAMILIES[name.removeprefix(PREFIX).removeprefix(VLLM_PREFIX)]
        assert exposed.type == family.kind
        is_theirs = name.startswith(VLLM_PREFIX)
        assert exposed.documentation == family.help + (" The engine is Kvasir, not vLLM." if is_theirs else "")
        for sample in exposed.samples:
            assert set(sample.labels) - {"le"} == {*COMMON_LABELS, *family.labels}


def test_every_error_class_is_a_known_label_value() -> None:
    failures, rejections = FAMILIES["request_failures"].known, FAMILIES["admission_rejections"].known
    refusals = (errors.Overloaded, errors.Draining)
    refusing = [error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, refusals)]
    assert {(refusal.code,) for refusal in refusing} == set(rejections)
    failing = [
        error
        for error in vars(errors).values()
        if isinstance(error, type)
        and issubclass(error, errors.ApiError)
        and not issubclass(error, (*refusals, errors.ClientGone))
        and not error.__name__.startswith("_")
    ]
    assert {(str(error.status), error.type) for error in failing} == set(failures)


def test_metric_help_texts_are_sentences() -> None:
    for family in FAMILIES.values():
        assert family.help.endswith("."), family.name
        assert "\n" not in family.help, family.name


def test_a_new_worker_replaces_the_cache_shape_of_the_old_worker(metrics: Metrics) -> None:
    metrics.observe_worker_start(HELLO)
    metrics.observe_engine(STEP)
    metrics.observe_worker_start(msgspec.structs.replace(HELLO, device="cuda"))
    samples = scrape(metrics)
    (shape,) = (name for name in samples if name.startswith("cache_config_info"))
    assert 'device="cuda"' in shape
    assert (samples["num_requests_running"], samples["generation_tokens_total"]) == (0, STEP.num_completion_tokens)


def test_gauges_of_a_dead_worker_are_dropped_and_counters_stay(metrics: Metrics) -> None:
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "max_num_requests_running")
    metrics.observe_engine(STEP)
    metrics.forget_engine()
    metrics.forget_engine()
    samples = scrape(metrics)
    assert not any(gauge in samples for gauge in gauges)
    assert samples["generation_tokens_total"] == STEP.num_completion_tokens
    metrics.observe_worker_start(HELLO)
    assert scrape(metrics)["num_requests_running"] == 0
    metrics.observe_engine(msgspec.structs.replace(STEP, num_running=9))
    assert scrape(metrics)["num_requests_running"] == 9


def test_a_directory_of_prometheus_client_in_the_environment_is_ignored(tmp_path: Path) -> None:
    code = (
        "from service.metrics.recorder import Metrics; from tests.ops.observations import observe_everything; "
        "metrics = Metrics('m'); observe_everything(metrics); observe_everything(metrics); "
        "print(b'llm_worker_restarts_total' in metrics.render()[0])"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert list(tmp_path.iterdir()) == []


def test_restarts_are_counted_once(metrics: Metrics) -> None:
    for number in (0, 2, 2, 3):
        metrics.set_worker_restarts(signal=number, exit=1)
    samples = scrape(metrics)
    assert samples['worker_restarts_total{reason="signal"}'] == 3
    assert samples['worker_restarts_total{reason="exit"}'] == 1
