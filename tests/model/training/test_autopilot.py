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
    base_config,
    make_plan,
    vocabulary_size,
)
from model.training.config import SourceConfig, TrainConfig

VOCAB_SIZE, NUM_TOKENS = 2048, 1_000_000


def machine(flops: float) -> Callable[[TrainConfig], float]:
    """Return the seconds per step on a machine of `flops` FLOPS: a step needs 6 FLOPs per parameter and token."""
    return lambda config: 6 * config.model.num_parameters * config.tokens_per_step / flops


def plan(seconds: float, flops: float = 1e11, num_tokens: int = NUM_TOKENS) -> Plan:
    source = SourceConfig(name="t", path=Path("t.txt"), repeats=1, held_out=0.0, licence="")
    base = base_config(VOCAB_SIZE, name="mine", sources=(source,))
    return make_plan(base, num_tokens, lambda: seconds, machine(flops))


def parameters(made: Plan) -> int:
    return made.config.model.num_parameters


def test_vocabulary_grows_with_the_text() -> None:
    sizes = [vocabulary_size(size) for size in (20_000, 50_000, 200_000, 1_000_000, 4_000_000, 20_000_000, 10**9)]
    assert sizes == [512, 512, 1024, 2048, 4096, 8192, 8192]


def test_more_time_and_faster_machines_give_larger_models() -> None:
    by_time = [parameters(plan(seconds)) for seconds in (30, 120, 600, 3600)]
    assert by_time == sorted(by_time)
    assert by_time[0] < by_time[-1]
    assert parameters(plan(60, flops=1e13)) > parameters(plan(60, flops=1e11))


@pytest.mark.parametrize("num_tokens", [6_000, 60_000, 1_000_000, 50_000_000])
@pytest.mark.parametrize("seconds", [40.0, 300.0, 3000.0])
@pytest.mark.parametrize("flops", [5e10, 2e11, 1e14])
def test_time_and_text_limit_the_model_size_and_the_steps(num_tokens: int, seconds: float, flops: float) -> None:
    made = plan(seconds, flops, num_tokens)
    config, seen = made.config, made.config.steps * made.config.tokens_per_step
    assert config.steps * machine(flops)(config) <= seconds
    assert seen <= MOST_PASSES * num_tokens or config.steps == FEWEST_STEPS
    assert config.steps <= made.most_steps
    if config.model.hidden_size > SIZES[0][0]:
        assert parameters(made) <= PARAMETERS_PER_TOKEN * num_tokens
        assert seen >= 0.99 * min(TOKENS_PER_PARAMETER * parameters(made), ENOUGH_PASSES * num_tokens)


def test_small_text_gets_a_small_model_with_dropout_however_long_the_time() -> None:
    made = plan(3600, num_tokens=30_000)
    assert parameters(made) < 500_000
    assert made.config.dropout > 0
    assert made.config.steps == made.most_steps
    assert made.config.steps * made.seconds_per_step < 600


def test_text_that_is_read_once_gets_no_dropout() -> None:
    assert plan(120, num_tokens=50_000_000).config.dropout == 0.0


@pytest.mark.parametrize("seconds", [-5.0, 0.0, 0.4])
def test_too_little_time_is_rejected(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"too few --minutes: 40 training steps, the fewest of a run, need [1-9]"):
        plan(seconds)
