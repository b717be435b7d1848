"""`kvasir train`: what its flags make of a recipe."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.training.config import TrainConfig
from model.training.train import RunSettings
from service.commands import train as command

RECIPE = Path(__file__).parents[2] / "model" / "training" / "configs" / "attention" / "alibi.toml"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainConfig, RunSettings]]:
    """What the command would have trained."""
    runs: list[tuple[TrainConfig, RunSettings]] = []

    def record(
        config: TrainConfig, settings: RunSettings, report: Callable[[str], None], should_stop: Callable[[], bool]
    ) -> bool:
        runs.append((config, settings))
        return True

    monkeypatch.setattr(command, "train", record)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    return runs


def run(*flags: str) -> int:
    threads = str(torch.get_num_threads())
    return command.main(["--config", str(RECIPE), "--out", "out", "--device", "cpu", "--threads", threads, *flags])


def test_without_flags_it_is_the_recipe(started: list[tuple[TrainConfig, RunSettings]]) -> None:
    assert run() == 0
    ((config, settings),) = started
    assert (config.seed, config.steps, config.warmup_steps, config.decay_steps) == (1, 600, 50, 200)
    assert (settings.attention, settings.run_directory) == ("sdpa", Path("runs/attention-alibi"))


def test_flags_replace_the_recipes(started: list[tuple[TrainConfig, RunSettings]]) -> None:
    assert run("--seed", "7", "--steps", "60", "--attention", "eager", "--no-compile", "--precision", "float32") == 0
    ((config, settings),) = started
    assert (config.seed, config.steps, config.warmup_steps, config.decay_steps) == (7, 60, 15, 20)
    assert (settings.attention, settings.compile, settings.precision) == ("eager", False, "float32")


@pytest.mark.parametrize("flags", [("--seed", "-1"), ("--attention", "flash"), ("--steps", "0")])
def test_what_is_not_understood_is_refused(
    started: list[tuple[TrainConfig, RunSettings]], flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*flags) == 2
    assert flags[0] in capsys.readouterr().err
    assert started == []
