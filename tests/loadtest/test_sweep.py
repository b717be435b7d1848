"""The sweep on simulated servers of known capacity, and the decisions that it is made of."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from loadtest.client.report import Slo
from loadtest.measurement.figures import number
from loadtest.sweep.compare import Verdict, compare
from loadtest.sweep.figures import findings, reversal, sweep_figures, warnings, with_margin
from loadtest.sweep.level import Level, Load, State, WindowPlan, measure, warm_up_length
from loadtest.sweep.search import bracket, capacity, levels_left, next_rate, settled
from tests.loadtest.queue_server import BatchServer, QueueServer

PRECISION = 0.03
NO_LIMITS = Slo()
RANDOM = (Phase.explicit, Phase.generate)  # shrinking would take minutes


def sweep(load: Load, first: float, slo: Slo = NO_LIMITS, *, seconds: float) -> list[Level]:
    """Return the levels of a sweep with windows of this length."""
    levels: list[Level] = []
    while (rate := next_rate(levels, first=first, precision=PRECISION)) is not None:
        levels.append(measure(load, rate, WindowPlan(seconds=seconds), slo))
        assert len(levels) < 30, [(each.rate, each.state) for each in levels]
    assert levels_left(levels, PRECISION) == 0
    return levels


def check(levels: list[Level], true_capacity: float) -> None:
    """Assert that the capacity is within 3 %, and that no rate above it is called stable."""
    served = capacity(levels)
    assert served is not None
    assert served.mean == pytest.approx(true_capacity, rel=0.03)
    stable = [rate for rate, state in settled(levels).items() if state is State.STABLE]
    assert 0.9 * true_capacity < max(stable) < true_capacity
    assert reversal(sweep_figures(levels, NO_LIMITS)) is None


@settings(max_examples=8, phases=RANDOM)
@given(
    num_slots=st.integers(1, 64),
    service_seconds=st.floats(0.01, 20.0),
    variation=st.floats(0.0, 0.5),
    first_share=st.floats(0.01, 3.0),
    seed=st.integers(0, 2**20),
)
def test_the_capacity_of_a_queue_is_found(
    num_slots: int, service_seconds: float, variation: float, first_share: float, seed: int
) -> None:
    def service(rng: random.Random) -> float:
        return service_seconds * rng.uniform(1 - variation, 1 + variation)

    rate = num_slots / service_seconds
    server, seconds = QueueServer(num_slots, service, seed), max(80, 2 * num_slots) / rate
    check(sweep(server, first_share * rate, seconds=seconds), rate)


@settings(max_examples=4, phases=RANDOM)
@given(
    fixed=st.floats(0.001, 0.1),
    each=st.floats(0.00001, 0.003),
    max_batch=st.integers(1, 32),
    num_tokens=st.integers(2, 40),
    seed=st.integers(0, 2**20),
)
def test_the_capacity_of_continuous_batching_is_found(
    fixed: float, each: float, max_batch: int, num_tokens: int, seed: int
) -> None:
    server = BatchServer(fixed, each, max_batch, num_tokens, seed)
    alone = num_tokens * (fixed + each)
    check(sweep(server, 1 / alone, seconds=max(alone, max(80, 4 * max_batch) / server.capacity)), server.capacity)


def test_rejections_show_overload_although_no_queue_grows() -> None:
    server = QueueServer(4, lambda rng: 0.5, max_waiting=8)
    overload = measure(server, 12.0, WindowPlan(seconds=5.0), NO_LIMITS)
    assert overload.state is State.OVERLOADED
    assert abs(overload.growth) < 0.01
    levels = sweep(server, 1.0, seconds=10.0)
    check(levels, 8.0)
    lost = sweep_figures(levels, NO_LIMITS)["levels"][-1]
    assert lost["shed"] > 0
    assert lost["failed"] == 0


def test_a_long_warm_up_is_no_overload_and_does_not_count() -> None:
    """Without a limit on concurrency, the requests in flight grow until the first one ends, after 6 windows."""
    level = measure(QueueServer(10_000, lambda rng: 60.0), 5.0, WindowPlan(seconds=10.0), NO_LIMITS)
    assert level.state is State.STABLE
    assert level.warm_up >= 6
    assert level.run().requests_per_second == pytest.approx(5.0, rel=0.05)
    assert len(level.run().sent) == len([each for each in level.run().sent if each.e2e_seconds == pytest.approx(60.0)])


def test_the_highest_rate_within_the_objectives_is_found() -> None:
    """The inter-token latency is 10 ms, and 1 ms more per request in the batch."""
    server = BatchServer(0.010, 0.001, 32, 10)
    levels = sweep(server, 8.0, Slo(itl_p95_ms=30.0), seconds=0.5)
    figures = sweep_figures(levels, Slo(itl_p95_ms=30.0))
    rates = figures["slo_rate"]
    assert 0.5 * server.capacity < rates["highest"] < rates["lowest_above"] <= (1 + PRECISION) * rates["highest"]
    assert all(bool(level.slo_breaches) == (level.rate > rates["highest"]) for level in levels)
    assert f"N / {number(rates['highest'])} replicas" in findings(figures)[-1]
    assert "highest rate that meets the objectives" in findings(figures)[-1]
    assert rates["highest"] < figures["stable_rate"]["highest"]


def test_percentiles_need_enough_requests_and_lie_within_their_intervals() -> None:
    level = measure(QueueServer(4, lambda rng: rng.uniform(0.1, 0.3)), 10.0, WindowPlan(seconds=5.0), NO_LIMITS)
    (row,) = sweep_figures([level], NO_LIMITS)["levels"]
    assert row["p99_e2el_ms"] is not None
    assert row["p99.9_e2el_ms"] is None, "fewer than 1000 requests"
    assert row["p99.9_itl_ms"] is not None, "three gaps a request"
    for name, (low, high) in row["intervals"].items():
        assert low <= row[name] <= high or name.startswith("p99")


def test_the_bracket_ignores_an_unclear_rate_below_a_good_one() -> None:
    assert bracket({1.0: True, 2.0: None, 3.0: True, 4.0: None, 5.0: False}) == (3.0, 4.0)
    assert bracket({1.0: True, 2.0: False, 3.0: True}) == (1.0, 2.0)
    assert bracket({1.0: False}) == (0.0, 1.0)
    assert bracket({}) == (0.0, float("inf"))


def test_an_interrupted_sweep_has_findings_of_its_levels() -> None:
    assert "No rate was measured." in findings(sweep_figures([], NO_LIMITS))
    level = measure(QueueServer(4, lambda rng: 0.5), 2.0, WindowPlan(seconds=5.0), NO_LIMITS)
    lines = findings(sweep_figures([level], NO_LIMITS))
    assert lines[0] == "Highest stable rate: 2 requests/s. The limit is unknown, because no rate overloaded the server."
    assert "The knee is at or below 2 requests/s, the lowest rate tried." in lines
    assert [line for line in lines if "bjective" in line] == ["No objectives were given; see --slo-ttft-p95-ms."]
    assert lines[-1].startswith("For N requests/s: N / 2 replicas (2: highest stable rate), rounded up")


def test_a_rate_that_went_well_above_an_overloaded_one_is_reported_first() -> None:
    slow, fast = (QueueServer(slots, lambda rng: 0.5) for slots in (2, 8))
    levels = [
        measure(server, rate, WindowPlan(seconds=5.0), NO_LIMITS)
        for server, rate in ((slow, 2.0), (slow, 6.0), (fast, 10.0), (fast, 20.0))
    ]
    for level in levels:
        level.client_cpu_share = 0.0  # the simulation uses a whole core
    figures = sweep_figures(levels, NO_LIMITS)
    assert "kept up with 10 requests/s, although 6 overloaded it. The limits are not reliable." in findings(figures)[0]
    assert warnings(figures)[0] == findings(figures)[0]
    figures["levels"][0]["client_cpu_share"] = 0.9
    assert warnings(figures)[0] == "at 2 requests/s: the client used 90% of a core; latencies may be the client's own"
    del figures["levels"][1]
    assert findings(figures)[0].startswith("Highest stable rate: ")


def test_the_warm_up_ends_where_the_values_become_steady() -> None:
    assert warm_up_length(np.array([0, 5, 9, 20, 21, 19, 20, 20, 21, 19])) == 3
    assert warm_up_length(np.array([20] * 8)) == 0


def test_a_comparison_weighs_the_change_against_tolerance_and_interval() -> None:
    def with_capacity(mean: float, margin: float) -> dict[str, Any]:
        estimate = {"mean": mean, "low": mean - margin, "high": mean + margin}
        limits = {key: {"highest": None, "lowest_above": None} for key in ("stable_rate", "slo_rate")}
        return {"capacity": {"requests_per_second": estimate}, "levels": [], **limits}

    def verdict(mean: float, margin: float) -> Verdict:
        (row,) = compare(with_capacity(100.0, 3.0), with_capacity(mean, margin), 0.05)
        assert row["figure"] == "capacity, requests/s"
        return Verdict(row["verdict"])

    assert verdict(96.0, 1.0) is Verdict.SAME
    assert verdict(90.0, 1.0) is Verdict.REGRESSION
    assert verdict(90.0, 15.0) is Verdict.UNCERTAIN
    assert verdict(110.0, 1.0) is Verdict.IMPROVEMENT


def test_a_rate_is_not_overloaded_if_a_higher_one_served_clearly_more() -> None:
    """A disturbance of the machine during a level looks like overload."""

    def level(rate: float, served: float, state: State) -> Level:
        ends = [float(number) for number in range(1, 9)]
        return Level(rate=rate, state=state, warm_up=0, ends=ends, window_seconds=1.0, growth=0.0, served=[served] * 8)

    disturbed, good, full = (
        level(4.0, 2.0, State.OVERLOADED), level(8.0, 8.0, State.STABLE), level(16.0, 10.0, State.OVERLOADED)
    )  # fmt: skip
    assert settled([disturbed, good, full]) == {4.0: State.UNCLEAR, 8.0: State.STABLE, 16.0: State.OVERLOADED}
    assert settled([level(10.1, 10.0, State.STABLE), full])[10.1] is State.UNCLEAR, "above the capacity of 10"


def test_a_margin_has_no_digits_of_a_rounding_error() -> None:
    row = {"served": 10.7, "intervals": {"served": (10.7, 10.7 + 1e-14)}}
    assert with_margin(row, "served") == "10.7 ± 0"
