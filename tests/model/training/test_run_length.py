"""Number of steps of a run with a deadline: simulated runs whose steps advance the clock."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from model.checkpoint.manifest import read_manifest
from model.training import autopilot, state
from model.training.autopilot import Deadline
from model.training.config import TrainConfig, load_train_config
from model.training.optimizer import rate_factor
from model.training.state import Progress
from model.training.train import train
from tests.model.training.test_train import config as fables
from tests.model.training.test_train import losses, no_completions, settings

RECIPE = Path(__file__).parents[3] / "model" / "training" / "configs" / "tales.toml"


class Time:
    """Replacement for the module `time`, whose clock the simulated steps advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    for module in (autopilot, state):
        monkeypatch.setattr(module, "time", fake)
    return fake


def planned(steps: int) -> TrainConfig:
    return dataclasses.replace(load_train_config(RECIPE), steps=steps, warmup_steps=10, decay_steps=steps // 5)


def simulate(
    time: Time,
    deadline: Deadline,
    config: TrainConfig,
    seconds_of: Callable[[int], float],
    loss_of: Callable[[int], float] = lambda step: 10.0 / (step + 1),
) -> list[TrainConfig]:
    """Return the config at each step of a run, with a held-out evaluation every 20 steps."""
    configs: list[TrainConfig] = []
    held_out: list[float] = []
    progress = Progress(lambda line: None)
    while len(configs) < config.steps:
        configs.append(config)
        time.now += seconds_of(len(configs))
        if len(configs) % 20 == 0:
            held_out.append(loss_of(len(configs)))
        progress.record(len(configs))
        config = deadline.next_config(len(configs), config, progress.seconds_per_step, held_out)
    return configs


def in_seconds(
    time: Time, seconds: float, *, most_steps: int = 10**6, changed: Callable[[TrainConfig], None] = lambda config: None
) -> Deadline:
    return Deadline(at=time.now + seconds, after_seconds=10.0, most_steps=most_steps, changed=changed)


SPEEDS: dict[str, Callable[[int], float]] = {
    "as measured": lambda step: 0.5,
    "slower": lambda step: 1.1,
    "faster": lambda step: 0.2,
    "slower half-way": lambda step: 0.5 if step < 300 else 1.0,
    "compiled": lambda step: 40.0 if step == 1 else 0.4,
    "uneven": lambda step: 0.3 if step % 2 else 0.7,
}


@pytest.mark.parametrize("speed", SPEEDS)
def test_run_ends_in_time_at_any_speed_with_the_rates_of_its_last_recipe(time: Time, speed: str) -> None:
    written: list[TrainConfig] = []
    configs = simulate(time, in_seconds(time, 600.0, changed=written.append), planned(1000), SPEEDS[speed])
    assert 0.95 * 600 <= time.now - 1000 + 10 <= 1.05 * 600
    last = configs[-1]
    assert 0.15 * last.steps <= last.decay_steps <= 0.25 * last.steps
    assert [rate_factor(step, config) for step, config in enumerate(configs)] == [
        rate_factor(step, last) for step in range(last.steps)
    ]
    decaying = {config.steps for step, config in enumerate(configs) if step > config.steps - config.decay_steps}
    assert decaying == {last.steps}
    assert written[-1] == last
    assert len(written) < 30


def test_text_size_limits_the_steps(time: Time) -> None:
    configs = simulate(time, in_seconds(time, 600.0, most_steps=400), planned(400), lambda step: 0.1)
    assert configs[-1].steps == 400
    assert time.now < 1060


def test_rising_held_out_loss_ends_the_plateau(time: Time) -> None:
    deadline = in_seconds(time, 6000.0)
    configs = simulate(time, deadline, planned(10_000), lambda step: 0.1, lambda step: 3.0 + abs(step - 200) / 1000)
    assert deadline.is_overfitting
    assert 240 < configs[-1].steps < 350


def test_one_higher_held_out_loss_does_not_end_the_plateau(time: Time) -> None:
    deadline = in_seconds(time, 100.0)
    simulate(time, deadline, planned(500), lambda step: 0.1, lambda step: 10.0 / step + (0.5 if step == 200 else 0.0))
    assert not deadline.is_overfitting


def test_run_resumed_after_its_deadline_decays_at_once(time: Time) -> None:
    deadline, config = in_seconds(time, -100.0), planned(1000)
    for step in (301, 302, 303):
        time.now += 0.5
        config = deadline.next_config(step, config, 0.5, [])
    assert config.steps < 310


def test_speed_is_measured_over_the_last_minute(time: Time) -> None:
    progress = Progress(lambda line: None)
    assert progress.seconds_per_step is None
    for step in range(1, 201):
        time.now += 1.0 if step < 100 else 3.0
        progress.record(step)
    assert progress.seconds_per_step == pytest.approx(3.0)


def _shorten(step: int, config: TrainConfig, *_: object) -> TrainConfig:
    return dataclasses.replace(config, steps=12, decay_steps=4) if step == 6 else config


def test_shortened_run_has_the_losses_of_the_shorter_run(tmp_path: Path) -> None:
    shortened = dataclasses.replace(settings(tmp_path, "shortened"), next_config=_shorten)
    assert train(fables(steps=16, decay_steps=4), shortened, lambda text: None, complete=no_completions)
    short = fables(steps=12, decay_steps=4)
    assert train(short, settings(tmp_path, "short"), lambda text: None, complete=no_completions)
    assert len(losses(tmp_path, "short")) == 12
    assert losses(tmp_path, "shortened") == losses(tmp_path, "short")
    assert read_manifest(shortened.checkpoint).training["steps"] == 12
