"""Planned recipes for different texts, times and machines."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from model.training.config import TrainConfig
from model.training.run_plan import (
    ENOUGH_PASSES,
    FEWEST_STEPS,
    LADDER,
    MOST_PASSES,
    PARAMETERS_PER_TOKEN,
    TOKENS_PER_PARAMETER,
    Plan,
    PlanError,
    Task,
    make_plan,
    vocabulary_size,
)

TASK = Task(
    name="mine",
    text="tales.txt",
    seed=1,
    directory=Path("runs/mine"),
    vocab_size=2048,
    num_tokens=1_000_000,
    num_held_out_tokens=20_000,
    may_compile=False,
    prompts=("The king",),
    description="",
)


def machine(flops: float) -> Callable[[TrainConfig], float]:
    """Return a machine with this many operations per second: a step needs 6 per parameter and token."""
    return lambda config: 6 * config.model.num_parameters * config.tokens_per_step / flops


def plan(seconds: float, flops: float = 1e11, **changes: object) -> Plan:
    return make_plan(dataclasses.replace(TASK, **changes), lambda: seconds, machine(flops))  # type: ignore[arg-type]


def passes(made: Plan, num_tokens: int) -> float:
    return made.config.steps * made.config.tokens_per_step / num_tokens


def test_the_vocabulary_grows_with_the_text() -> None:
    sizes = [vocabulary_size(size) for size in (20_000, 50_000, 200_000, 1_000_000, 4_000_000, 20_000_000, 10**9)]
    assert sizes == [512, 512, 1024, 2048, 4096, 8192, 8192]


def test_more_time_and_faster_machines_give_larger_models() -> None:
    by_time = [plan(seconds).config.model.num_parameters for seconds in (30, 120, 600, 3600)]
    assert by_time == sorted(by_time)
    assert by_time[0] < by_time[-1]
    assert plan(60, flops=1e13).config.model.num_parameters > plan(60, flops=1e11).config.model.num_parameters


@pytest.mark.parametrize("num_tokens", [6_000, 60_000, 1_000_000, 50_000_000])
@pytest.mark.parametrize("seconds", [40.0, 300.0, 3000.0])
@pytest.mark.parametrize("flops", [5e10, 2e11, 1e14])
def test_time_and_text_bound_the_model_and_the_steps(num_tokens: int, seconds: float, flops: float) -> None:
    made = plan(seconds, flops, num_tokens=num_tokens)
    config, parameters = made.config, made.config.model.num_parameters
    taken = config.steps * machine(flops)(config)
    assert taken + made.after_seconds <= seconds
    assert passes(made, num_tokens) <= MOST_PASSES or config.steps == FEWEST_STEPS
    assert config.steps <= made.most_steps
    if config.model.hidden_size > LADDER[0].width:
        assert parameters <= PARAMETERS_PER_TOKEN * num_tokens
        seen = config.steps * config.tokens_per_step
        assert seen >= 0.99 * min(TOKENS_PER_PARAMETER * parameters, ENOUGH_PASSES * num_tokens)


def test_a_text_of_a_hundred_kilobytes_gets_no_large_model_for_much_time() -> None:
    made = plan(3600, num_tokens=30_000, vocab_size=512)
    assert made.config.model.num_parameters < 500_000
    assert made.config.dropout > 0
    assert "overfit" in made.reasons[-1]
    assert made.config.steps * machine(1e11)(made.config) < 600


def test_a_text_that_is_read_once_needs_no_dropout() -> None:
    assert plan(120, num_tokens=50_000_000).config.dropout == 0.0


def test_all_of_it_is_said() -> None:
    made = plan(300)
    model = made.config.model
    said = "\n".join(made.reasons)
    assert f"{model.num_layers} layers of width {model.hidden_size}" in said
    assert f"{made.config.steps:,} steps of {made.config.tokens_per_step:,} tokens" in said


def test_it_is_compiled_where_that_is_worth_the_wait() -> None:
    assert not plan(300, may_compile=True).compile
    assert plan(900, may_compile=True).compile
    assert not plan(900).compile
    assert plan(900, may_compile=True).config.steps > 0


def test_no_time_is_told() -> None:
    for seconds in (-5.0, 0.0, 4.5):
        with pytest.raises(PlanError, match=r"too few --minutes: the smallest model needs [1-9]"):
            plan(seconds)


def test_a_text_of_which_nothing_is_held_out_has_one_source() -> None:
    assert [source.name for source in plan(60).config.sources] == ["tales.txt, to learn from", "tales.txt"]
    assert [source.name for source in plan(60, num_held_out_tokens=0).config.sources] == ["tales.txt, to learn from"]


def test_the_same_measurements_give_the_same_plan() -> None:
    assert plan(300) == plan(300)
