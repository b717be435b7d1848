"""Inter-token latency target: the limit on running sequences, on a simulated machine."""

import math
from typing import Any

import pytest

from service.engine.scheduling.latency_limits import RunningLimit
from tests.engine.simulated_steps import SimulatedSteps

TARGET = 0.05
# Fixed cost, cost per sequence and cost per prompt token: about as assumed, zero, dominant; and a slow machine.
MACHINES = {
    "usual": (0.016, 0.001, 0.0002),
    "proportional": (0.0, 0.002, 0.0005),
    "flat": (0.03, 0.0004, 0.0001),
    "slow": (0.004, 0.008, 0.002),
}


def machine(name: str = "usual", **values: Any) -> SimulatedSteps:
    fixed, per_sequence, per_prompt_token = MACHINES[name]
    values = {"fixed": fixed, "per_sequence": per_sequence, "per_prompt_token": per_prompt_token, **values}
    return SimulatedSteps(**{"target_seconds": TARGET, **values})


@pytest.mark.parametrize("name", MACHINES)
def test_the_limit_settles_at_the_target_with_near_best_throughput(name: str) -> None:
    limited = machine(name)
    limited.run_full(600)
    rate = limited.run_full(1200)
    assert limited.share_within(TARGET) >= 0.97
    best = 0.0
    for max_num_running in (2, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56):  # the best limit, if it had been known
        fixed = machine(name, target_seconds=math.inf, max_num_running=max_num_running)
        fixed.run_full(150)
        fixed_rate = fixed.run_full(300)
        if fixed.share_within(TARGET) < 0.97:
            break
        best = max(best, fixed_rate)
    assert rate >= 0.8 * best


def test_without_a_target_the_limit_is_max_num_running() -> None:
    free = machine(target_seconds=math.inf)
    free.run_full(600)
    assert free.scheduler.max_num_running == 64
    assert free.scheduler.num_running >= 60
    assert free.share_within(TARGET) == 0.0


def test_a_latency_target_met_by_a_full_batch_sets_no_limit() -> None:
    limited, free = machine(target_seconds=1.0), machine(target_seconds=math.inf)
    assert limited.run_full(300) == free.run_full(300)
    assert limited.scheduler.max_num_running == 64


def test_at_least_one_sequence_runs_at_an_unreachable_latency_target() -> None:
    limited = machine(target_seconds=0.001)
    limited.run_full(1500)
    assert limited.scheduler.max_num_running == limited.scheduler.num_running == 1


def test_noisy_step_times_move_the_running_limit_little() -> None:
    limited, noisy = machine(), machine(noise=0.3)
    limited.run_full(600)
    noisy.run_full(600)
    limits = []
    for _ in range(100):
        noisy.run_full(10)
        limits.append(noisy.scheduler.max_num_running)
    settled = limited.scheduler.max_num_running
    assert max(abs(limit - settled) for limit in limits) <= 0.2 * settled


def test_one_stalled_step_lowers_the_running_limit_little_and_briefly() -> None:
    limited = machine()
    limited.run_full(600)
    before = limited.scheduler.max_num_running
    limited.slowdown = 100.0
    limited.run_full(1)
    limited.slowdown = 1.0
    assert 0.85 * before <= limited.scheduler.max_num_running < before
    limited.run_full(300)
    assert limited.scheduler.max_num_running == pytest.approx(before, abs=1)


def test_the_limit_follows_a_machine_that_slows_and_recovers() -> None:
    limited = machine()
    limited.run_full(600)
    before = limited.scheduler.max_num_running
    limited.slowdown = 1.5
    limited.run_full(600)
    slow = limited.scheduler.max_num_running
    assert slow < 0.6 * before
    limited.run_full(600)
    assert limited.share_within(TARGET) >= 0.97
    limited.slowdown = 1.0
    limited.run_full(600)
    assert limited.scheduler.max_num_running == pytest.approx(before, abs=1)


def test_a_lower_limit_preempts_no_sequence_and_idle_time_does_not_count() -> None:
    limited = machine()
    for _ in range(20):
        limited.arrive()
    while limited.scheduler.num_running < 20:
        limited.step()
    limited.slowdown = 4.0
    for _ in range(5):
        limited.step()
    assert limited.scheduler.max_num_running < limited.scheduler.num_running == 20
    limited.slowdown = 1.0
    while limited.scheduler.has_work:
        limited.step()
    before = limited.scheduler.max_num_running
    limited.now += 3600.0
    limited.arrive()
    limited.step()
    limited.step()
    assert limited.scheduler.max_num_running >= before


def test_the_running_limit_is_reset_after_a_failed_step() -> None:
    limited = machine()
    limited.run_full(100)
    assert limited.scheduler.max_num_running < 64
    limited.scheduler.reset_prefix_cache()
    assert limited.scheduler.max_num_running == 64


def test_each_accepted_draft_token_counts_for_the_latency_target() -> None:
    """A step that samples three tokens of a sequence may take three times as long as a step that samples one."""
    limits = []
    for num_drafted, seconds in ((0, 0.03), (2, 0.09)):
        limit = RunningLimit(TARGET, 64)
        limit.observe(seconds, num_sequences=1, num_decodes=1, num_tokens=1 + num_drafted)
        limits.append(limit.num_sequences)
    assert limits[0] == limits[1] < 64
