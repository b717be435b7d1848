"""Arrival times: mean rate, bursts, and the shapes of the rate over time."""

import argparse
import itertools
import statistics

import pytest

from loadtest.client.arrivals import ArrivalShape, add_arrival_arguments, arrivals, arrivals_from_arguments


def some(count: int, rate: float = 10.0, seed: int = 1, **settings: object) -> list[float]:
    return list(itertools.islice(arrivals(rate, seed, **settings), count))  # type: ignore[arg-type]


@pytest.mark.parametrize("burstiness", [1.0, 0.25])
def test_gaps_have_the_mean_of_the_rate_and_the_deviation_of_the_burstiness(burstiness: float) -> None:
    gaps = [later - earlier for earlier, later in itertools.pairwise(some(4000, burstiness=burstiness))]
    # Gamma gaps: the deviation is the mean over the root of the shape; 5 standard errors of a Poisson process are 8 %.
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.08 / burstiness**0.5)
    assert statistics.stdev(gaps) == pytest.approx(0.1 / burstiness**0.5, rel=0.12 / burstiness**0.5)
    assert some(9) == some(9) != some(9, seed=2)


def in_windows(times: list[float], width: float) -> list[int]:
    return [sum(width * number <= time < width * (number + 1) for time in times) for number in range(4)]


def test_a_ramp_rises_for_a_period_and_then_stays() -> None:
    counts = in_windows(some(700, shape=ArrivalShape.RAMP, period_seconds=60.0, burstiness=50.0), 20.0)
    assert counts == pytest.approx([200 / 6, 600 / 6, 1000 / 6, 200], abs=5)


def test_a_day_has_a_high_and_a_low_and_the_mean_rate() -> None:
    times = some(900, shape=ArrivalShape.DIURNAL, period_seconds=40.0, burstiness=50.0)
    counts = in_windows(times, 20.0)
    assert counts[:2] == pytest.approx(counts[2:], abs=5)
    assert sum(counts[:2]) == pytest.approx(400, abs=5)
    assert counts[0] == pytest.approx(302, abs=5), "a half sine has 2/pi of its height: 200 * (1 + 0.8 * 2 / pi)"
    assert times == sorted(times)


def test_options_are_read_and_checked() -> None:
    parser = argparse.ArgumentParser()
    add_arrival_arguments(parser)
    given = parser.parse_args(["--arrivals", "ramp", "--burstiness", "0.5", "--period-seconds", "9"])
    given.rate, given.seed = 2.0, 3
    shaped = arrivals(2.0, 3, shape=ArrivalShape.RAMP, burstiness=0.5, period_seconds=9.0)
    assert next(arrivals_from_arguments(given)) == next(shaped)
    given.burstiness = 0.0
    with pytest.raises(ValueError, match="--burstiness must be above 0"):
        arrivals_from_arguments(given)
