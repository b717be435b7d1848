"""Steps that are written together are reported like single steps."""

from functools import partial
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values

from service.metrics import step_metrics_buffer
from service.metrics.step_metrics_buffer import StepMetricsBuffer
from tests.ops.observations import STEP


class Bench:
    """A buffer and its metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.made: dict[str, Any] = {}
        self.tally = StepMetricsBuffer(
            counter=partial(self._make, Counter),
            gauge=partial(self._make, Gauge),
            histogram=partial(self._make, Histogram),
        )

    def _make(self, kind: Any, name: str) -> Any:
        if name not in self.made:
            self.made[name] = kind(name, "What it is.", registry=self.registry)
        return self.made[name]

    def step(self, **changed: Any) -> None:
        self.tally.add(msgspec.structs.replace(STEP, **changed))

    def seen(self, *names: str) -> list[float | None]:
        return [self.registry.get_sample_value(name) for name in names]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(values, "ValueClass", values.MutexValue)  # in no file, whatever other tests selected
    return Bench()


def test_the_buffer_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_metrics_buffer, "_MAX_STEPS", 3)
    for number, num_seen in [(1, 0), (2, 0), (3, 3), (4, 3)]:
        bench.step(num_running=number, num_completion_tokens=2)
        assert bench.seen("batch_size_count") == [num_seen]
    assert bench.seen("num_requests_running", "generation_tokens_total") == [3, 6]


def test_what_was_gathered_is_seen_when_it_is_asked_for(bench: Bench) -> None:
    for step_seconds in (0.25, 0.5, 1.0):
        bench.step(step_seconds=step_seconds)
    bench.tally.flush()
    names = ("iteration_duration_seconds_count", "iteration_duration_seconds_sum", "engine_busy_seconds_total")
    assert bench.seen(*names) == [3, 1.75, 1.75]
    bench.tally.flush()
    assert bench.seen(*names) == [3, 1.75, 1.75]


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("num_cached_prompt_tokens", "prompt_tokens_cached_total"),
        ("num_prefix_queries", "prefix_cache_queries_total"),
        ("num_prefix_hits", "prefix_cache_hits_total"),
        ("num_preemptions", "num_preemptions_total"),
        ("num_drafts", "spec_decode_num_drafts_total"),
        ("num_draft_tokens", "spec_decode_num_draft_tokens_total"),
        ("num_accepted_tokens", "spec_decode_num_accepted_tokens_total"),
        ("num_non_finite", "non_finite_sequences_total"),
    ],
)
def test_what_a_step_counts_adds_up(bench: Bench, field: str, name: str) -> None:
    for number in (3, 0, 4):
        bench.step(**{field: number})
    bench.tally.flush()
    assert bench.seen(name) == [7]


def test_an_engine_at_rest_holds_nothing(bench: Bench) -> None:
    bench.step()
    bench.step()
    bench.tally.rest()
    bench.tally.flush()
    assert bench.seen("batch_size_count", "num_requests_running", "num_requests_waiting") == [2, 0, 0]
    assert bench.seen("kv_cache_usage_perc") == [0]
    bench.step(num_running=5)
    bench.tally.flush()
    assert bench.seen("batch_size_count", "num_requests_running") == [3, 5]
