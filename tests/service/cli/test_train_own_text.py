"""`kvasir train --corpus`: from a text file to a checkpoint, with kills and interrupts during the run."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from model.checkpoint.manifest import read_manifest
from model.training import autopilot, state
from model.training.config import load_train_config
from model.training.state import read_log
from model.training.train import RunSettings, train
from service.cli import train as command
from service.cli.main import main
from tests.model.training.test_train import saved_step

ROOT = Path(__file__).parents[3]
TALES = (ROOT / "loadtest" / "client" / "tales.txt").read_text()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Working directory with a training text so short that the whole run takes seconds."""
    (tmp_path / "my.txt").write_text(TALES[:24_000])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_seconds_since_start", lambda: 0.0)  # the test process is older than the run
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield tmp_path
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
        signal.signal(number, handler)


def flags(*more: str) -> list[str]:
    given = ["--corpus", "my.txt", "--out", "out/mine", "--minutes", "60"]
    # One thread: more threads spin at barriers, which slows down models this small.
    return [*given, "--device", "cpu", "--precision", "float32", "--threads", "1", "--no-compile", *more]


def run(*more: str) -> int:
    return main(["train", *flags(*more)])


def start(directory: Path) -> subprocess.Popen[str]:
    """Start `kvasir train` in a new process."""
    return subprocess.Popen(
        [sys.executable, "-m", "service.cli", "train", *flags()],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """Return the process' stdout up to the first line with `words`."""
    assert process.stdout is not None
    said = ""
    while line := process.stdout.readline():  # a file's own iterator would read ahead
        said += line
        if words in line:
            return said
    raise AssertionError(f"{words!r} is not in {said!r}; {process.communicate()[1]}")


def losses(run_directory: Path) -> list[float]:
    log = read_log(run_directory / "log.jsonl")
    assert [line["step"] for line in log] == list(range(len(log)))
    return [line["loss"] for line in log]


def test_a_failed_attempt_uses_no_time_of_the_next_attempt(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_seconds_since_start", lambda: 600.0)
    assert run("--minutes", "9") == 1
    assert "too few --minutes" in capsys.readouterr().err
    monkeypatch.setattr(command, "_seconds_since_start", lambda: 0.0)
    assert run("--minutes", "9", "--stop-after", "1") == 0
    assert json.loads((here / "runs" / "mine" / "plan.json").read_text())["planning_seconds"] < 540


def test_a_run_directory_inside_the_corpus_directory_resumes(here: Path) -> None:
    for steps in ("1", "2"):
        assert run("--corpus", ".", "--stop-after", steps) == 0
    assert len(losses(here / "runs" / "mine")) == 2


def test_texts_that_all_quote_each_other_are_one_source(here: Path) -> None:
    quoted = " ".join(f"word{number}" for number in range(30))
    (here / "my.txt").write_text("<|endoftext|>".join(f"{number} {quoted}" for number in range(120)))
    assert run("--stop-after", "1") == 0
    (source,) = load_train_config(here / "runs" / "mine" / "recipe.toml").sources
    assert source.path == here / "runs" / "mine" / "text.jsonl"


@pytest.mark.slow
def test_a_resumed_run_has_only_the_remaining_time(here: Path) -> None:
    assert run("--stop-after", "3") == 0
    path = here / "runs" / "mine" / "plan.json"
    planned = load_train_config(here / "runs" / "mine" / "recipe.toml").steps
    path.write_text(json.dumps(json.loads(path.read_text()) | {"planning_seconds": 3600.0}))
    assert run() == 0
    assert len(losses(here / "runs" / "mine")) < planned / 2


@pytest.mark.slow
def test_a_killed_and_interrupted_run_resumes_to_the_end_of_its_recipe(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = start(here)
    read_until(process, "text: ")
    process.send_signal(signal.SIGINT)  # while the process trains the tokenizer
    _, said = process.communicate()
    assert (process.returncode, said) == (130, "\nkvasir train: stopped; run the same command again to continue\n")

    process = start(here)
    said = read_until(process, "step 1/")
    for what in ("text: 24 KB of running text", "vocabulary: ", "model: ", "training: "):
        assert what in said
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL

    process = start(here)
    assert "resuming the run in runs/mine" in read_until(process, "step 1/")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert out.endswith("saved in runs/mine; run the same command again to continue\n")
    assert err == "\nstopping after this training step; interrupt again to stop now\n"
    step = saved_step(here / "runs" / "mine")
    assert step == len(losses(here / "runs" / "mine")) >= 1

    assert run() == 0
    assert f"resuming at step {step} of" in capfd.readouterr().out

    recipe = load_train_config(here / "runs" / "mine" / "recipe.toml")
    alone = RunSettings(
        run_directory=here / "alone",
        checkpoint=here / "out" / "alone",
        device="cpu",
        precision="float32",
        compile=False,
        stop_after=None,
    )
    assert train(recipe, alone, lambda text: None)
    assert losses(here / "runs" / "mine") == losses(here / "alone")


@pytest.mark.slow
def test_a_finished_run_prints_the_commands_to_use_the_model(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out = capfd.readouterr().out
    config = load_train_config(here / "runs" / "mine" / "recipe.toml")
    assert config.model.num_parameters < 400_000
    assert "overfit" in out
    assert re.search(r"^done in \d+:\d\d of 1:00:00$", out, re.M)
    held_out = read_manifest(here / "out" / "mine").training["held_out_bits_per_byte"]
    assert 1.5 < held_out["my.txt"] < 4.0
    served, _, generated = [
        line for line in out.splitlines() if line.startswith("  kvasir") or line.startswith("  curl")
    ]
    assert served.split() == ["kvasir", "serve", "--checkpoint", "out/mine"]
    program, *arguments = shlex.split(generated)
    assert program == "kvasir"
    done = subprocess.run(
        [sys.executable, "-m", "service.cli", *arguments],
        cwd=here,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()

    assert run() == 0
    again = capfd.readouterr().out
    assert again.startswith(
        "out/mine is already finished; to start over, choose another --run-directory, or delete runs/mine"
    )
    assert served in again

    shutil.rmtree(here / "out" / "mine")  # as if killed before the checkpoint was complete
    (here / "out" / "mine" / ".partial").mkdir(parents=True)
    (here / "out" / "mine" / ".partial" / "model.safetensors").write_bytes(b"half")
    assert run() == 0
    read_manifest(here / "out" / "mine").verify()


@pytest.mark.slow
def test_a_run_is_not_resumed_with_another_text(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--stop-after", "3") == 0
    assert capfd.readouterr().out.endswith("saved in runs/mine; run the same command again to continue\n")
    (here / "my.txt").write_text(TALES[24_000:50_000])
    assert run() == 1
    assert capfd.readouterr().err == (
        "kvasir train: runs/mine: this run began with a different text than my.txt; give the first text to "
        "--corpus, or start over: choose another --run-directory, or delete runs/mine\n"
    )
    (here / "moved.txt").write_text(TALES[:24_000])
    assert run("--corpus", "moved.txt", "--stop-after", "4") == 1  # the run directory belongs to my.txt
    (here / "my.txt").write_text(TALES[:24_000])
    (here / "runs" / "mine" / "plan.json").write_text("{")
    assert run() == 1
    assert "plan.json: plan missing or damaged; delete runs/mine to start over" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["No space left on device (os error 28)", "File too large (os error 27)"])
def test_a_full_disk_keeps_the_last_save(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], reason: str
) -> None:
    assert run("--stop-after", "3") == 0
    before = (here / "runs" / "mine" / "state.safetensors").read_bytes()
    with monkeypatch.context() as full:

        def refuse(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
            path.write_bytes(b"half")
            raise SafetensorError(f"Error while serializing: I/O error: {reason}")

        full.setattr(state, "save_file", refuse)
        capfd.readouterr()
        assert run("--stop-after", "5") == 1
    assert capfd.readouterr().err == (
        "kvasir train: runs/mine: the disk is full, or a limit of this user is reached; the last save of the training "
        "run is intact; free some space, then run the same command to continue\n"
    )
    assert (here / "runs" / "mine" / "state.safetensors").read_bytes() == before
    assert not (here / "runs" / "mine" / "state.partial").exists()
    assert run("--stop-after", "5") == 0
    assert "resuming at step 3 of" in capfd.readouterr().out


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[autopilot.OwnTextRequest, RunSettings]]:
    """Replace `train_own_text` by a function that records its arguments. Returns the recorded runs."""
    asked: list[tuple[autopilot.OwnTextRequest, RunSettings]] = []

    def record(request: autopilot.OwnTextRequest, settings: RunSettings, *_: object) -> bool:
        asked.append((request, settings))
        return False

    monkeypatch.setattr(command, "train_own_text", record)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    return asked


def test_defaults_of_a_run_on_own_text(requests: list[tuple[autopilot.OwnTextRequest, RunSettings]]) -> None:
    assert main(["train", "--corpus", "a.txt", "--corpus", "b.jsonl", "--out", "checkpoints/My tales!"]) == 0
    ((request, settings),) = requests
    assert request.corpora == (Path("a.txt"), Path("b.jsonl"))
    assert (request.minutes, request.seed, request.name) == (10.0, 1, "My-tales-")
    assert settings.run_directory == Path("runs/My-tales-")
    assert request.began > 0


def test_a_text_may_come_from_the_environment(
    requests: list[tuple[autopilot.OwnTextRequest, RunSettings]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASIR_CORPUS", "a.txt:b.txt")
    assert main(["train", "--out", "x", "--minutes", "2.5", "--seed", "0"]) == 0
    ((request, _),) = requests
    assert (request.corpora, request.minutes, request.seed) == ((Path("a.txt"), Path("b.txt")), 2.5, 0)


REJECTED: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "give either --corpus (a training text) or --config (a recipe)"),
    "both": (
        ["--corpus", "a.txt", "--config", "a.toml"],
        "give either --corpus (a training text) or --config (a recipe)",
    ),
    "steps": (
        ["--corpus", "a.txt", "--steps", "5"],
        "--steps needs --config; with --corpus, set the duration with --minutes",
    ),
    "minutes": (
        ["--config", "a.toml", "--minutes", "5"],
        "--minutes needs --corpus; with --config, set the duration with --steps",
    ),
    "none": (["--corpus", "a.txt", "--minutes", "0"], "--minutes: must be greater than 0, not '0'"),
    "negative": (["--corpus", "a.txt", "--minutes", "-3"], "--minutes: must be greater than 0, not '-3'"),
    "no number": (["--corpus", "a.txt", "--minutes", "nan"], "--minutes: must be"),
    "a year": (["--corpus", "a.txt", "--minutes", "525600"], "--minutes: must be less than or equal to 10080"),
    "in itself": (
        ["--corpus", "a.txt", "--run-directory", "x"],
        "--out x overlaps x, where this command saves the run",
    ),
}


@pytest.mark.parametrize("what", REJECTED)
def test_contradicting_flags_are_rejected(
    requests: list[tuple[autopilot.OwnTextRequest, RunSettings]], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given, message = REJECTED[what]
    assert main(["train", *given, "--out", "x"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvasir train: {message}")
    assert said.count("\n") == 1
    assert requests == []


def test_an_invalid_text_is_reported_before_anything_is_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "my.txt").write_bytes(b"\x89PNG")
    assert run() == 1
    assert "my.txt: not UTF-8 text: 'utf-8' codec can't decode byte 0x89 in position 0" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["my.txt"]


def test_too_few_minutes_are_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--minutes", "0.01") == 1
    assert "too few --minutes: " in capsys.readouterr().err


def test_the_run_directory_of_a_recipe_is_not_reused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "runs" / "mine").mkdir(parents=True)
    (here / "runs" / "mine" / "state.safetensors").write_bytes(b"")
    assert run() == 1
    assert capsys.readouterr().err == (
        "kvasir train: runs/mine: holds a run begun with --config, not --corpus; choose another --run-directory\n"
    )


def test_a_directory_with_other_files_is_not_written_to(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "out" / "mine").mkdir(parents=True)
    (here / "out" / "mine" / "letter.txt").write_text("dear")
    assert run() == 1
    assert (
        "out/mine: contains files but no manifest.json; choose an empty or a new directory" in capsys.readouterr().err
    )
