"""bench_overload: the figures of a load, and the aims."""

from typing import Any

import pytest

from loadtest.client.outcome import Ending
from loadtest.scenarios.bench_overload import TimedLoad, growth_per_minute, retry_after_errors, ttft_ms
from tests.loadtest.outcomes import outcome


def load(*outcomes: Any, settled: float = 10.0, ended: float = 20.0) -> TimedLoad:
    return TimedLoad(outcomes, settled, ended, client_cpu_share=0.1)


def answer(sent: float, chunks: tuple[float, ...], ending: Ending = Ending.OK) -> Any:
    end = max(chunks, default=sent)
    return outcome(ending=ending, intended_seconds=sent, chunk_seconds=chunks, end_seconds=end, completion_tokens=10)


def test_throughput_counts_the_tokens_that_arrive_in_the_steady_part() -> None:
    whole, early, late = answer(11.0, (12.0, 13.0)), answer(8.0, (9.0, 11.0)), answer(19.0, (19.5, 21.0))
    assert load(whole).tokens_per_second == 1.0
    assert load(whole, early, late).tokens_per_second == 2.0
    assert load(answer(1.0, (2.0, 3.0)), answer(12.0, (13.0,), Ending.TIMEOUT)).tokens_per_second == 0.0


def test_ttft_counts_admitted_requests_of_the_steady_part() -> None:
    given = load(answer(1.0, (9.0,)), answer(11.0, (11.5,)), answer(12.0, (), Ending.SHED))
    assert ttft_ms([given], 99) == 500.0
    assert ttft_ms([load()], 99) is None
    found = given.to_dict()
    assert found["endings"] == {"ok": 1, "shed": 1}
    assert found["failures"] == {}


def test_percentiles_of_several_loads_are_over_all_requests() -> None:
    short = load(answer(11.0, (11.5,)), settled=10.0, ended=15.0)
    long = load(answer(11.0, (11.1,)), answer(12.0, (12.1,)), answer(13.0, (13.1,)), settled=10.0, ended=25.0)
    assert (short.tokens_per_second, long.tokens_per_second) == (2.0, 2.0)
    assert ttft_ms([short, long], 50) == 100.0
    assert ttft_ms([short, long], 100) == 500.0
    assert ttft_ms([load()], 99) is None


def test_growth_is_the_least_squares_slope_per_minute() -> None:
    assert growth_per_minute([(float(second), 100.0 + 0.5 * second) for second in range(20)]) == pytest.approx(30.0)
    assert growth_per_minute([(1.0, 5.0)]) == 0.0


def test_the_share_of_right_retry_after_announcements_is_read_from_the_histogram() -> None:
    name = "llm_retry_after_error_seconds"
    buckets = {"-0.5": 1, "0.5": 7, "+Inf": 8}
    lines = [f'{name}_bucket{{engine="0",le="{bound}"}} {count}' for bound, count in buckets.items()]
    found = retry_after_errors("\n".join([f"# TYPE {name} histogram", *lines, ""]))
    assert found == {"promises_watched": 8, "share_within_0.5_s": 0.75}
