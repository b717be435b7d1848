"""Each observation changes exactly its metrics, under Kvasir's names and vLLM's."""

import importlib.metadata
import os
import platform
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.ipc.messages import FinishReason
from service.metrics.definitions import COMMON_LABELS, FAMILIES, PREFIX, VLLM_PREFIX, Kind
from service.metrics.recorder import EngineState, Metrics, Objectives, prepare_directory, render
from service.protocol import errors
from tests.ops.observations import MODEL, OBSERVATIONS, STEP, Observation, finished, observe_everything, scrape

# https://docs.vllm.ai/en/stable/usage/metrics/, limited to the metrics that Kvasir has.
VLLM_FAMILIES = {
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


def changes(before: dict[str, float]) -> dict[str, float]:
    """Return the samples that changed, except buckets."""
    after = {name: value for name, value in scrape().items() if "_bucket{" not in name}
    deltas = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: delta for name, delta in deltas.items() if delta}


@pytest.mark.parametrize("observation", OBSERVATIONS, ids=lambda observation: str(observation.name))
def test_an_observation_changes_its_samples_and_no_other(metrics: Metrics, observation: Observation) -> None:
    before = scrape()
    observation.make(metrics)
    metrics.flush()
    assert changes(before) == pytest.approx(observation.changes)


def test_every_family_moves_in_some_observation(metrics: Metrics) -> None:
    nothing: dict[str, float] = {}
    observe_everything(metrics)
    moved = {name.partition("{")[0] for name in changes(nothing)}
    expected = set()
    for family in FAMILIES.values():
        name = family.exposed_name.removeprefix(PREFIX)
        expected |= {f"{name}_count", f"{name}_sum"} if family.kind is Kind.HISTOGRAM else {name}
    assert moved == expected


def test_the_process_names_its_versions(metrics: Metrics) -> None:
    version, torch, litserve = map(importlib.metadata.version, ("kvasir", "torch", "litserve"))
    labels = f'litserve="{litserve}",python="{platform.python_version()}",torch="{torch}",version="{version}"'
    assert scrape()[f"build_info{{{labels}}}"] == 1


def test_counters_with_known_labels_begin_at_zero(metrics: Metrics) -> None:
    samples = scrape()
    for name in (
        'admission_rejections_total{reason="draining"}',
        'request_success_total{finished_reason="error"}',
        'requests_cancelled_total{phase="waiting"}',
        'slo_requests_total{met="false",slo="all"}',
        'worker_restarts_total{reason="exit"}',
        "num_preemptions_total",
    ):
        assert samples[name] == 0


def test_a_histogram_counts_up_to_the_bound_and_including_it(metrics: Metrics) -> None:
    metrics.observe_first_token(0.25)
    samples = scrape()
    assert samples['time_to_first_token_seconds_bucket{le="0.16"}'] == 0
    assert samples['time_to_first_token_seconds_bucket{le="0.25"}'] == 1
    assert samples['time_to_first_token_seconds_bucket{le="+Inf"}'] == 1


def test_bounds_ascend_and_hold_the_objectives() -> None:
    for family in FAMILIES.values():
        assert list(family.buckets) == sorted(set(family.buckets))
        assert bool(family.buckets) == (family.kind is Kind.HISTOGRAM)
    assert Objectives().ttft_seconds in FAMILIES["time_to_first_token_seconds"].buckets
    assert Objectives().tpot_seconds in FAMILIES["request_time_per_output_token_seconds"].buckets


def test_a_step_without_prompts_leaves_the_prompt_counters(metrics: Metrics) -> None:
    metrics.observe_step(STEP)
    before = scrape()
    metrics.observe_step(
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
    metrics.flush()
    assert changes(before) == {
        "generation_tokens_total": 3,
        "engine_busy_seconds_total": 0.03125,
        "batch_size_count": 1,
        "batch_size_sum": 3,
        "iteration_tokens_total_count": 1,
        "iteration_tokens_total_sum": 3,
        "iteration_duration_seconds_count": 1,
        "iteration_duration_seconds_sum": 0.03125,
    }


def test_an_idle_engine_holds_nothing(metrics: Metrics) -> None:
    metrics.observe_step(STEP)
    metrics.observe_idle()
    samples = scrape()
    assert [samples[f"num_requests_{state}"] for state in ("running", "waiting")] == [0, 0]
    assert samples["kv_cache_usage_perc"] == 0


@pytest.mark.parametrize(
    ("num_completion_tokens", "ttft_seconds"), [(1, 0.5), (0, None)], ids=["one token", "no token"]
)
def test_time_per_output_token_needs_two_tokens(
    metrics: Metrics, num_completion_tokens: int, ttft_seconds: float | None
) -> None:
    finished(metrics, num_completion_tokens=num_completion_tokens, ttft_seconds=ttft_seconds)
    samples = scrape()
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
def test_a_choice_meets_an_objective_or_not(
    metrics: Metrics, ttft_seconds: float, e2e_seconds: float, met: dict[str, bool]
) -> None:
    finished(metrics, ttft_seconds=ttft_seconds, e2e_seconds=e2e_seconds)
    samples = scrape()
    for slo, is_met in met.items():
        assert samples[f'slo_requests_total{{met="true",slo="{slo}"}}'] == is_met
        assert samples[f'slo_requests_total{{met="false",slo="{slo}"}}'] == (not is_met)


def test_objectives_can_be_set(metrics: Metrics) -> None:
    strict = Metrics(MODEL, objectives=Objectives(ttft_seconds=0.125, tpot_seconds=0.01))
    finished(strict)
    samples = scrape()
    assert [samples[f'slo_requests_total{{met="false",slo="{slo}"}}'] for slo in ("ttft", "tpot")] == [1, 1]


def test_a_failed_choice_meets_no_objective_and_has_no_latency(metrics: Metrics) -> None:
    before = scrape()
    finished(metrics, FinishReason.ERROR)
    assert changes(before) == {
        'request_success_total{finished_reason="error"}': 1,
        'slo_requests_total{met="false",slo="ttft"}': 1,
        'slo_requests_total{met="false",slo="tpot"}': 1,
        'slo_requests_total{met="false",slo="all"}': 1,
    }


def test_an_aborted_choice_is_counted_and_nothing_else(metrics: Metrics) -> None:
    before = scrape()
    finished(metrics, FinishReason.ABORT)
    assert changes(before) == {'request_success_total{finished_reason="abort"}': 1}


def test_one_state_holds(metrics: Metrics) -> None:
    for state in EngineState:
        metrics.set_engine_state(state)
        samples = scrape()
        assert {other: samples[f'engine_state{{state="{other}"}}'] for other in EngineState} == {
            other: float(other is state) for other in EngineState
        }


def test_engines_are_told_apart(metrics: Metrics) -> None:
    other = Metrics(MODEL, engine="1")
    metrics.observe_first_token(0.25)
    other.observe_inter_token(0.125)
    other.flush()
    assert scrape(engine="0")["time_to_first_token_seconds_count"] == 1
    assert scrape(engine="1")["time_to_first_token_seconds_count"] == 0
    assert scrape(engine="1")["inter_token_latency_seconds_count"] == 1


def test_observers_of_one_series_lose_nothing(metrics: Metrics) -> None:
    twin = Metrics(MODEL)
    for observer in (metrics, twin, metrics, twin):
        observer.count_cancellation("running")
    assert scrape()['requests_cancelled_total{phase="running"}'] == 4


def test_vllm_names_carry_the_same_values(metrics: Metrics) -> None:
    assert {name for name, family in FAMILIES.items() if family.in_vllm} == VLLM_FAMILIES
    observe_everything(metrics)
    ours, theirs = scrape(PREFIX), scrape(VLLM_PREFIX)
    shared = {FAMILIES[name].exposed_name.removeprefix(PREFIX) for name in VLLM_FAMILIES}

    def is_shared(sample: str) -> bool:
        name = sample.partition("{")[0]
        return name in shared or any(name == f"{base}_{end}" for base in shared for end in ("bucket", "sum", "count"))

    assert theirs == {name: value for name, value in ours.items() if is_shared(name)}


def test_the_exposition_is_well_formed(metrics: Metrics) -> None:
    observe_everything(metrics)
    body, content_type = render()
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


def test_a_directory_must_be_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    with pytest.raises(RuntimeError, match="prepare_directory"):
        Metrics(MODEL)


def test_every_error_of_the_service_is_a_known_ending() -> None:
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


def test_help_is_a_sentence_of_plain_words() -> None:
    for family in FAMILIES.values():
        assert family.help.endswith("."), family.name
        assert "\n" not in family.help, family.name


def test_each_directory_is_private_and_new(metrics: Metrics) -> None:
    metrics.count_replay("gave_up")
    first = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    second = Path(prepare_directory())
    assert first != second
    assert [path.stat().st_mode & 0o077 for path in (first, second)] == [0, 0]
    Metrics(MODEL).count_replay("resubmitted")
    assert scrape()['requests_replayed_total{outcome="gave_up"}'] == 0
