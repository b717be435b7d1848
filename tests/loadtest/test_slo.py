"""Service level objectives: limits, goodput and options."""

import argparse
from typing import Any

import pytest

from loadtest.client.outcome import ClientKind, Ending
from loadtest.client.report import Slo, add_slo_arguments
from loadtest.measurement.figures import ratio_spread, spread
from tests.loadtest.outcomes import failed, outcome


@pytest.mark.parametrize(
    ("kept", "broken", "line"),
    [
        ({"ttft_p95_ms": 100.1}, {"ttft_p95_ms": 99.9}, "TTFT p95: 100.0 ms, limit 99.9 ms"),
        ({"itl_p95_ms": 20.1}, {"itl_p95_ms": 19.9}, "ITL p95: 20.0 ms, limit 19.9 ms"),
        ({"tpot_p95_ms": 23.4}, {"tpot_p95_ms": 23.3}, "TPOT p95: 23.3 ms, limit 23.3 ms"),
        ({"e2e_p95_ms": 170.1}, {"e2e_p95_ms": 169.9}, "E2E p95: 170.0 ms, limit 169.9 ms"),
        ({"min_output_throughput": 8.0}, {"min_output_throughput": 8.1}, "output throughput: 8.0 tokens/s, limit 8.1"),
    ],
)  # fmt: skip
def test_each_speed_limit_is_reported_when_broken(kept: dict[str, Any], broken: dict[str, Any], line: str) -> None:
    outcomes = [outcome(0), outcome(1)]
    assert Slo(**kept).breaches(outcomes, 8.0) == []
    assert Slo(**broken).breaches(outcomes, 8.0) == [line]


def test_failures_and_shed_load_have_separate_limits() -> None:
    outcomes = [outcome(0), outcome(1), failed(2, Ending.TIMEOUT), failed(3, Ending.SHED)]
    assert Slo().breaches(outcomes, 1.0) == ["failed: 25.00% of the requests sent, limit 0.00%"]
    assert Slo(max_failed_share=0.25).breaches(outcomes, 8.0) == []
    shed = Slo(max_failed_share=None, max_shed_share=0.2)
    assert shed.breaches(outcomes, 1.0) == ["shed: 25.00% of the requests sent, limit 20.00%"]


def test_a_limit_without_measurements_is_broken() -> None:
    whole = outcome(0, client=ClientKind.WHOLE, chunk_seconds=[])
    assert Slo(ttft_p95_ms=100).breaches([whole], 1.0) == ["TTFT p95: nothing measured, limit 100 ms"]
    assert Slo().breaches([], 1.0) == ["no request was sent"]


def test_goodput_counts_requests_within_every_limit() -> None:
    assert Slo().is_good(outcome(0))
    assert not Slo().is_good(failed(0, Ending.SHED))
    assert not Slo(ttft_p95_ms=99).is_good(outcome(0))
    assert not Slo(tpot_p95_ms=23).is_good(outcome(0))
    assert not Slo(e2e_p95_ms=169).is_good(outcome(0))
    assert Slo(ttft_p95_ms=99).is_good(outcome(0, client=ClientKind.WHOLE, chunk_seconds=[]))


def test_options_set_the_limits() -> None:
    parser = argparse.ArgumentParser()
    add_slo_arguments(parser)
    assert Slo.from_arguments(parser.parse_args([])) == Slo()
    given = parser.parse_args(["--slo-ttft-p95-ms", "50", "--slo-max-failed-share", "0.1"])
    assert Slo.from_arguments(given) == Slo(ttft_p95_ms=50.0, max_failed_share=0.1)


def test_a_spread_has_median_minimum_and_maximum() -> None:
    assert spread((3.0, 1.0, 2.0, 10.0)) == {
        "median": 2.5,
        "min": 1.0,
        "max": 10.0,
        "values": [3.0, 1.0, 2.0, 10.0],
    }
    assert ratio_spread([2.0, 9.0], [1.0, 3.0])["values"] == [2.0, 3.0]
