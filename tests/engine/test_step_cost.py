"""Estimate of a row's cost (the time that one more row adds to a step) from durations of steps of several sizes."""

import random

import pytest

from service.engine.scheduling.speculation import DraftPolicy


def measured(*steps: tuple[int, float]) -> DraftPolicy:
    cost = DraftPolicy(512)
    for num_rows, seconds in steps:
        cost.observe(num_rows, seconds)
    return cost


@pytest.mark.parametrize(("fixed", "per_row"), [(4.0, 0.3), (1.0, 0.1), (0.0, 1.0), (10.0, 0.01)])
def test_the_cost_of_a_row_follows_a_line_fitted_to_step_durations(fixed: float, per_row: float) -> None:
    rng = random.Random(1)
    rows = [rng.randint(1, 64) for _ in range(300)]
    cost = measured(*((n, (fixed + per_row * n) * rng.uniform(0.9, 1.1)) for n in rows))
    for n in (1, 4, 16, 64):
        found, wanted = cost.marginal_cost(n), per_row * n / (fixed + per_row * n)
        assert found == pytest.approx(min(1.0, max(0.05, wanted)), abs=0.06)


def test_by_the_prior_one_more_row_costs_more_in_a_larger_step() -> None:
    for cost in (DraftPolicy(512), measured((16, 1.0), (16, 1.0))):
        shares = [cost.marginal_cost(n) for n in (1, 4, 16, 64, 1000)]
        assert shares == sorted(shares)
        assert shares[2] == pytest.approx(0.5)
        assert shares[0] < 0.1
        assert 0.9 < shares[-1] <= 1.0


def test_a_stalled_step_changes_the_cost_of_a_row_little() -> None:
    steps = [(n, 1.0 + n / 16) for n in range(1, 33)] * 4
    calm, held_up = measured(*steps), measured(*steps, (32, 1000.0))
    assert held_up.marginal_cost(16) == pytest.approx(calm.marginal_cost(16), abs=0.05)


def test_the_cost_of_a_row_follows_a_changed_machine() -> None:
    rows = [1, 8, 16, 32] * 100
    cost = measured(*((n, 1.0 + n) for n in rows), *((n, 100.0) for n in rows * 10))
    assert cost.marginal_cost(16) < 0.15


def test_the_cost_of_a_row_stays_within_bounds_for_any_durations() -> None:
    assert measured((4, 0.0)).marginal_cost(4) == pytest.approx(0.2)
    falling = measured(*((n, 50.0 - n) for n in range(1, 40)))
    assert [falling.marginal_cost(n) for n in (1, 64)] == [0.05, 1.0]
