"""Length of a run with a deadline: simulated runs whose steps advance the clock."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from model.checkpoint.manifest import read_manifest
from model.training import run_length as module
from model.training.config import TrainConfig, load_train_config
from model.training.optimizer import rate_factor
from model.training.run_length import Clock, Deadline, Pace
from model.training.state import read_log
from model.training.train import RunSettings, train

RECIPE = Path(__file__).parents[3] / "model" / "training" / "configs" / "tales.toml"


class Time:
    """Replacement for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(module, "time", fake)
    return fake


def planned(steps: int) -> TrainConfig:
    return dataclasses.replace(load_train_config(RECIPE), steps=steps, warmup_steps=10, decay_steps=steps // 5)


def simulate(
    time: Time,
    pace: Pace,
    config: TrainConfig,
    seconds_of: Callable[[int], float],
    loss_of: Callable[[int], float] = lambda step: 10.0 / (step + 1),
) -> list[TrainConfig]:
    """Return the config at each step of a run, with a held-out evaluation every 20 steps."""
    configs: list[TrainConfig] = []
    while len(configs) < config.steps:
        configs.append(config)
        time.now += seconds_of(len(configs))
        measured = loss_of(len(configs)) if len(configs) % 20 == 0 else None
        config = pace.after_step(len(configs), config, measured)
    return configs


def deadline(time: Time, directory: Path, *, seconds: float, most_steps: int = 10**6) -> Deadline:
    clock = Clock(directory / "clock.json", time.now)
    return Deadline(
        clock, seconds=seconds, after_seconds=10.0, most_steps=most_steps, losses={}, changed=lambda config: None
    )


SPEEDS: dict[str, Callable[[int], float]] = {
    "as measured": lambda step: 0.5,
    "slower": lambda step: 1.1,
    "faster": lambda step: 0.2,
    "slower half-way": lambda step: 0.5 if step < 300 else 1.0,
    "compiled": lambda step: 40.0 if step == 1 else 0.4,
    "uneven": lambda step: 0.3 if step % 2 else 0.7,
}


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_run_ends_in_time_whatever_the_speed(time: Time, tmp_path: Path, speed: str) -> None:
    pace = deadline(time, tmp_path, seconds=600.0)
    configs = simulate(time, pace, planned(1000), SPEEDS[speed])
    assert 0.95 * 600 <= pace.spent + 10 <= 1.05 * 600
    last = configs[-1]
    assert 0.15 * last.steps <= last.decay_steps <= 0.25 * last.steps


@pytest.mark.parametrize("speed", SPEEDS)
def test_the_rates_are_those_of_the_recipe_that_is_left_in_the_end(time: Time, tmp_path: Path, speed: str) -> None:
    configs = simulate(time, deadline(time, tmp_path, seconds=600.0), planned(1000), SPEEDS[speed])
    met = [rate_factor(step, config) for step, config in enumerate(configs)]
    assert met == [rate_factor(step, configs[-1]) for step in range(configs[-1].steps)]


def test_once_the_rate_decays_the_length_stands(time: Time, tmp_path: Path) -> None:
    configs = simulate(time, deadline(time, tmp_path, seconds=600.0), planned(1000), lambda step: 0.5)
    decaying = {config.steps for step, config in enumerate(configs) if step > config.steps - config.decay_steps}
    assert len(decaying) == 1


def test_a_text_bears_only_so_many_steps(time: Time, tmp_path: Path) -> None:
    pace = deadline(time, tmp_path, seconds=600.0, most_steps=400)
    configs = simulate(time, pace, planned(400), lambda step: 0.1)
    assert configs[-1].steps == 400
    assert pace.spent < 60


def test_a_held_out_loss_that_rises_ends_the_plateau(time: Time, tmp_path: Path) -> None:
    pace = deadline(time, tmp_path, seconds=6000.0)
    configs = simulate(time, pace, planned(10_000), lambda step: 0.1, lambda step: 3.0 + abs(step - 200) / 1000)
    assert pace.learns_by_heart
    assert 240 < configs[-1].steps < 350


def test_what_a_killed_attempt_measured_beyond_its_save_does_not_count(time: Time, tmp_path: Path) -> None:
    seen = {20: 4.0, 40: 3.0, 60: 2.0}
    clock = Clock(tmp_path / "clock.json", time.now)
    pace = Deadline(clock, seconds=600.0, after_seconds=1.0, most_steps=10**6, losses=seen, changed=lambda config: None)
    config = planned(1000)
    for step, loss in ((31, None), (40, 3.1), (60, 2.9)):
        time.now += 1
        config = pace.after_step(step, config, loss)
    assert not pace.learns_by_heart
    for step, loss in ((80, 3.0), (100, 3.0)):
        time.now += 1
        config = pace.after_step(step, config, loss)
    assert pace.learns_by_heart


def test_one_worse_measurement_is_noise(time: Time, tmp_path: Path) -> None:
    pace = deadline(time, tmp_path, seconds=100.0)
    simulate(time, pace, planned(500), lambda step: 0.1, lambda step: 10.0 / step + (0.5 if step == 200 else 0.0))
    assert not pace.learns_by_heart


def test_changes_are_told(time: Time, tmp_path: Path) -> None:
    told: list[TrainConfig] = []
    clock = Clock(tmp_path / "clock.json", time.now)
    pace = Deadline(
        clock,
        seconds=600.0,
        after_seconds=10.0,
        most_steps=10**6,
        losses={},
        changed=lambda config: told.append(config),
    )
    configs = simulate(time, pace, planned(500), lambda step: 0.5)
    assert told[-1] == configs[-1]
    assert 1 <= len(told) < 10


def test_the_clock_counts_earlier_attempts(time: Time, tmp_path: Path) -> None:
    first = Clock(tmp_path / "clock.json", time.now)
    time.now += 30
    first.save()
    time.now += 100  # killed, and resumed later
    second = Clock(tmp_path / "clock.json", time.now)
    time.now += 5
    assert second.spent == pytest.approx(35)
    (tmp_path / "clock.json").write_text("half a")
    assert Clock(tmp_path / "clock.json", time.now).spent == 0


def test_a_run_that_comes_back_after_its_deadline_decays_at_once(time: Time, tmp_path: Path) -> None:
    (tmp_path / "clock.json").write_text("700")
    pace = deadline(time, tmp_path, seconds=600.0)
    config = planned(1000)
    for step in (301, 302, 303):
        time.now += 0.5
        config = pace.after_step(step, config, None)
    assert config.steps < 310


class Shorter(Pace):
    """Shortens a run while it is in progress."""

    def after_step(self, step: int, config: TrainConfig, held_out_loss: float | None) -> TrainConfig:
        super().after_step(step, config, held_out_loss)
        return dataclasses.replace(config, steps=16, decay_steps=4) if step == 10 else config


@pytest.mark.slow
def test_a_run_that_is_shortened_is_the_shorter_run(tmp_path: Path) -> None:
    planned_run = dataclasses.replace(planned(20), sample_prompts=("The king",), vocab_size=300, batch_size=2)
    planned_run = dataclasses.replace(planned_run, model=dataclasses.replace(planned_run.model, vocab_size=300))
    shorter = dataclasses.replace(planned_run, steps=16, decay_steps=4)
    for name, config, pace in (("shortened", planned_run, Shorter()), ("short", shorter, Pace())):
        settings = RunSettings(
            run_directory=tmp_path / name,
            checkpoint=tmp_path / f"{name}-model",
            device="cpu",
            precision="float32",
            compile=False,
            stop_after=None,
            pace=pace,
        )
        assert train(config, settings, lambda text: None)
    shortened, short = ([line["loss"] for line in read_log(tmp_path / n / "log.jsonl")] for n in ("shortened", "short"))
    assert len(short) == 16
    assert shortened == short
    assert read_manifest(tmp_path / "shortened-model").training["steps"] == 16


def test_without_a_deadline_the_config_stands(time: Time) -> None:
    pace = Pace()
    config = planned(100)
    assert pace.seconds_left(0, config) is None
    assert set(map(id, simulate(time, pace, config, lambda step: 2.0))) == {id(config)}
    assert pace.seconds_a_step == pytest.approx(2.0)
    assert pace.seconds_left(60, config) == pytest.approx(80.0)


def test_what_is_left_goes_by_the_speed_of_late(time: Time) -> None:
    pace = Pace()
    simulate(time, pace, planned(200), lambda step: 1.0 if step < 100 else 3.0)
    assert pace.seconds_a_step == pytest.approx(3.0)
