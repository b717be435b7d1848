"""Planned recipes for different texts, times and machines."""

from collections.abc import Callable
from pathlib import Path

import pytest

from model.training.autopilot import (
    ENOUGH_PASSES,
    FEWEST_STEPS,
    MOST_PASSES,
    PARAMETERS_PER_TOKEN,
    SIZES,
    TOKENS_PER_PARAMETER,
    Plan,
    PlanError,
    Size,
    make_config,
    make_plan,
    vocabulary_size,
)
from model.training.config import SourceConfig, TrainConfig

VOCAB_SIZE, NUM_TOKENS = 2048, 1_000_000


def machine(flops: float) -> Callable[[Size], float]:
    """Return a machine with this many operations per second: a step needs 6 per parameter and token."""
    return lambda size: 6 * size.model(VOCAB_SIZE).num_parameters * size.tokens_per_step / flops


def plan(seconds: float, flops: float = 1e11, num_tokens: int = NUM_TOKENS) -> Plan:
    return make_plan(VOCAB_SIZE, num_tokens, lambda: seconds, machine(flops))


def recipe(made: Plan, num_tokens: int = NUM_TOKENS) -> TrainConfig:
    return make_config(
        made,
        num_tokens,
        name="mine",
        description="",
        seed=1,
        vocab_size=VOCAB_SIZE,
        sources=(SourceConfig(name="t", path=Path("t.txt"), repeats=1, held_out=0.0, licence=""),),
        sample_prompts=(),
    )


def test_vocabulary_grows_with_the_text() -> None:
    sizes = [vocabulary_size(size) for size in (20_000, 50_000, 200_000, 1_000_000, 4_000_000, 20_000_000, 10**9)]
    assert sizes == [512, 512, 1024, 2048, 4096, 8192, 8192]


def test_more_time_and_faster_machines_give_larger_models() -> None:
    by_time = [SIZES.index(plan(seconds).size) for seconds in (30, 120, 600, 3600)]
    assert by_time == sorted(by_time)
    assert by_time[0] < by_time[-1]
    assert SIZES.index(plan(60, flops=1e13).size) > SIZES.index(plan(60, flops=1e11).size)


@pytest.mark.parametrize("num_tokens", [6_000, 60_000, 1_000_000, 50_000_000])
@pytest.mark.parametrize("seconds", [40.0, 300.0, 3000.0])
@pytest.mark.parametrize("flops", [5e10, 2e11, 1e14])
def test_time_and_text_bound_the_model_and_the_steps(num_tokens: int, seconds: float, flops: float) -> None:
    made = plan(seconds, flops, num_tokens)
    config = recipe(made, num_tokens)
    parameters, seen = config.model.num_parameters, made.steps * config.tokens_per_step
    assert made.steps * machine(flops)(made.size) <= seconds
    assert seen <= MOST_PASSES * num_tokens or made.steps == FEWEST_STEPS
    assert made.steps == config.steps <= made.most_steps
    if made.size != SIZES[0]:
        assert parameters <= PARAMETERS_PER_TOKEN * num_tokens
        assert seen >= 0.99 * min(TOKENS_PER_PARAMETER * parameters, ENOUGH_PASSES * num_tokens)


def test_small_text_gets_a_small_model_with_dropout_however_long_the_time() -> None:
    made = plan(3600, num_tokens=30_000)
    assert recipe(made, 30_000).model.num_parameters < 500_000
    assert recipe(made, 30_000).dropout > 0
    assert made.steps == made.most_steps
    assert made.steps * made.seconds_per_step < 600


def test_text_that_is_read_once_gets_no_dropout() -> None:
    assert recipe(plan(120, num_tokens=50_000_000), 50_000_000).dropout == 0.0


@pytest.mark.parametrize("seconds", [-5.0, 0.0, 0.4])
def test_too_little_time_is_rejected(seconds: float) -> None:
    with pytest.raises(PlanError, match=r"too few --minutes: the smallest model needs [1-9]"):
        plan(seconds)
