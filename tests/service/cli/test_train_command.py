"""`kvasir train --config`: flags override the recipe."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.evaluation.prompts import Complete
from model.training.config import TrainConfig
from model.training.train import RunSettings
from service.cli import train as command
from service.cli.main import main
from service.engine.engine import complete_batch

RECIPE = Path(__file__).parents[3] / "model" / "training" / "configs" / "attention" / "alibi.toml"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainConfig, RunSettings]]:
    """Replace `train` by a function that records its arguments. Returns the recorded runs."""
    runs: list[tuple[TrainConfig, RunSettings]] = []

    def record(
        config: TrainConfig,
        settings: RunSettings,
        report: Callable[[str], None],
        should_stop: Callable[[], bool],
        complete: Complete,
    ) -> bool:
        assert complete is complete_batch, "the engine generates the samples of the model card"
        runs.append((config, settings))
        return True

    monkeypatch.setattr(command, "train", record)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    return runs


def run(*flags: str) -> int:
    threads = str(torch.get_num_threads())
    recipe = [] if "--config" in flags else ["--config", str(RECIPE)]
    return main(["train", *recipe, "--out", "out", "--device", "cpu", "--threads", threads, *flags])


def test_without_flags_the_recipe_applies(started: list[tuple[TrainConfig, RunSettings]]) -> None:
    assert run() == 0
    ((config, settings),) = started
    assert (config.seed, config.steps, config.warmup_steps, config.decay_steps) == (1, 600, 50, 200)
    assert (settings.attention, settings.run_directory) == ("sdpa", Path("runs/attention-alibi"))


def test_flags_override_the_recipe(started: list[tuple[TrainConfig, RunSettings]]) -> None:
    assert run("--seed", "7", "--steps", "60", "--attention", "eager", "--no-compile", "--precision", "float32") == 0
    ((config, settings),) = started
    assert (config.seed, config.steps, config.warmup_steps, config.decay_steps) == (7, 60, 15, 20)
    assert (settings.attention, settings.compile, settings.precision) == ("eager", False, "float32")


def test_all_numbers_of_steps_scale_with_the_steps_flag(
    started: list[tuple[TrainConfig, RunSettings]], tmp_path: Path
) -> None:
    recipe = tmp_path / "talks.toml"
    source = {"name": '"g"', "path": '"g.jsonl"', "repeats": 1, "held_out": 0.0, "licence": '""', "chat_repeats": 1}
    numbers = ("chat_steps = 90", "average_steps = 300")
    lines = [f'extends = "{RECIPE}"', *numbers, "[[sources]]", *(f"{k} = {v}" for k, v in source.items())]
    recipe.write_text("\n".join(lines))
    assert run("--config", str(recipe), "--steps", "60") == 0
    ((config, _),) = started
    assert (config.steps, config.decay_steps, config.chat_steps, config.average_steps) == (60, 20, 9, 30)


@pytest.mark.parametrize("flags", [("--seed", "-1"), ("--attention", "flash"), ("--steps", "0")])
def test_invalid_flags_are_rejected(
    started: list[tuple[TrainConfig, RunSettings]], flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*flags) == 2
    assert flags[0] in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(
    "out",
    [
        "runs/tiny",
        "runs/../runs/tiny/",
        "link",
        "runs",
        "runs/tiny/state.safetensors",
        "runs/tiny/state.safetensors/out",
    ],
)
def test_the_output_directory_may_not_overlap_the_run_directory(
    started: list[tuple[TrainConfig, RunSettings]], tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "tiny")
    assert run("--out", f"{tmp_path}/{out}", "--run-directory", f"{tmp_path}/runs/tiny") == 2
    message = f"overlaps {tmp_path}/runs/tiny, where this command saves the run; choose another --out\n"
    assert capsys.readouterr().err == f"kvasir train: --out {tmp_path / out} {message}"
    assert started == []
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_the_output_directory_may_not_be_the_default_run_directory(
    started: list[tuple[TrainConfig, RunSettings]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--out", "runs/attention-alibi") == 2
    message = "overlaps runs/attention-alibi, where this command saves the run; choose another --out\n"
    assert capsys.readouterr().err == f"kvasir train: --out runs/attention-alibi {message}"
    assert started == []


def test_the_output_may_be_a_separate_directory_inside_the_run_directory(
    started: list[tuple[TrainConfig, RunSettings]],
) -> None:
    assert run("--out", "runs/attention-alibi/checkpoint") == 0
    assert len(started) == 1


@pytest.fixture
def own_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a recipe of two steps on a text that does not exist yet; the command sets no signal handlers."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    text = (RECIPE.parents[1] / "tales.toml").read_text()
    for old, new in (
        ("../../../loadtest/client/tales.txt", "text.txt"),
        ("steps = 240", "steps = 2"),
        ("warmup_steps = 24", "warmup_steps = 0"),
        ("decay_steps = 80", "decay_steps = 0"),
        ("vocab_size = 1024", "vocab_size = 260"),
        ("held_out = 0.1", "held_out = 0.0"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.toml").write_text(text)
    return tmp_path / "recipes" / "own.toml"


def test_a_missing_text_is_reported_before_a_directory_is_created(
    own_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = own_recipe.parent / ".." / "recipes" / "own.toml"
    assert run("--config", str(given), "--out", f"{tmp_path}/out", "--run-directory", f"{tmp_path}/run") == 1
    said = capsys.readouterr()
    advice = "correct the path of source grimm; docs/training.md lists the corpora of shipped recipes"
    assert said.err == f"kvasir train: {tmp_path}/recipes/text.txt: No such file or directory; {advice}\n"
    assert said.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["recipes"]


def test_the_start_message_names_the_run_directory(
    own_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_recipe.parent / "text.txt").write_text("The fox ran from the dog. " * 100)
    flags = ("--out", f"{tmp_path}/out", "--run-directory", f"{tmp_path}/run", "--no-compile", "--precision", "float32")
    assert run("--config", str(own_recipe), *flags) == 0
    where = f"saves to {tmp_path}/run every 1 min, then writes {tmp_path}/out"
    assert capsys.readouterr().out.startswith(f"training tales on cpu in float32: {where}\n")


def test_a_text_too_small_for_its_vocabulary_is_reported_at_once(
    own_recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_recipe.parent / "text.txt").write_text("The fox ran from the dog. " * 100)
    own_recipe.write_text(own_recipe.read_text().replace("vocab_size = 260", "vocab_size = 9000"))
    flags = ("--config", str(own_recipe), "--out", f"{tmp_path}/out", "--run-directory", f"{tmp_path}/run")
    for _ in range(2):  # the second run reads the saved tokenizer
        assert run(*flags) == 1
        said = capsys.readouterr().err
        found = re.search(r"the texts yield only (\d+) tokens: set vocab_size = \1, or give more text\n$", said)
        assert found is not None
        most = int(found[1])
    assert 257 < most < 9000
    own_recipe.write_text(own_recipe.read_text().replace("vocab_size = 9000", f"vocab_size = {most}"))
    assert run(*flags, "--no-compile", "--precision", "float32") == 0


def test_a_missing_recipe_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert run("--config", "nope.toml") == 1
    said = capsys.readouterr().err
    assert said.startswith("kvasir train: recipe nope.toml: No such file or directory; give a recipe, such as model/")
    assert said.count("\n") == 1


HUGE = f"1{'0' * 400}"
# By test id: lines that a recipe adds to the recipe it extends, and the expected error message.
ODD: dict[str, tuple[str, str]] = {
    "width": (
        "[model]\nhidden_size = 1_000_000_000",
        r"needs at least .* MiB of memory, but .* MiB are free; lower batch_size or",
    ),
    "layers": (
        "[model]\nnum_layers = 10_000\nmlp_size = 1_000_000",
        r"parameters with .* needs at least .* MiB of memory, but",
    ),
    "theta": (f"[model]\nrope_theta = {HUGE}", "rope_theta must be a positive number"),
    "batch": ("batch_size = 1_000_000_000", r"tokens per step needs at least .* MiB"),
    "batch beyond all bounds": (f"batch_size = {HUGE}", "batch_size: Expected `int` <= 9223372036854775807"),
    "rate": (f"matrix_lr = {HUGE}", "matrix_lr: Number out of range"),
    "rate that float32 cannot hold": ("adam_lr = 1e300", "adam_lr: Expected `float` <= 1000000000"),
    "clip": (f"grad_clip = {HUGE}", "grad_clip: Number out of range"),
    "decay": (f"weight_decay = {HUGE}", "weight_decay: Number out of range"),
    "minutes": (f"checkpoint_minutes = {HUGE}", "checkpoint_minutes: Number out of range"),
    "seed": ("seed = 9223372036854775808", "seed: Expected `int` <= 9223372036854775807"),
    "name": (f'name = "{"n" * 201}"', "and have at most 200 characters"),
    "name of lines": ('name = "a\\nb"', "name must consist of letters, digits"),
}


@pytest.mark.parametrize("name", ODD)
def test_invalid_recipe_values_cause_a_one_line_error_before_training(
    started: list[tuple[TrainConfig, RunSettings]], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said, message = ODD[name]
    (tmp_path / "odd.toml").write_text(f'extends = "{RECIPE}"\n{said}\n')
    assert run("--config", f"{tmp_path}/odd.toml") == 1
    assert started == []
    line = capsys.readouterr().err
    assert re.search(message, line)
    assert line.startswith("kvasir train: ")
    assert line.removesuffix("\n").isprintable()
    assert len(line) < 600


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RuntimeError("can't allocate memory\nframes"),
            "training failed: can't allocate memory; if memory ran out, lower batch_size or the",
        ),
        (MemoryError(), "training failed: out of memory; if memory ran out, lower batch_size or the model's sizes"),
    ],
)
def test_a_model_that_exceeds_memory_causes_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    def refuse(*arguments: object) -> bool:
        raise error

    monkeypatch.setattr(command, "train", refuse)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert run() == 1
    said = capsys.readouterr().err
    assert said.startswith(f"kvasir train: {line}")
    assert said.count("\n") == 1
