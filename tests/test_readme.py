"""Run the commands of README.md and docs/training.md as written, against a real service with the shipped model."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cli.main import COMMANDS
from tests.e2e.process import PATIENCE_SECONDS, Service, serving

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()
TRAINING = (ROOT / "docs" / "training.md").read_text()
CHECKPOINT = ROOT / "checkpoints" / "kvasir-20m"
URL = "http://127.0.0.1:8000"


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def commands(text: str = README) -> list[str]:
    """Return the commands after `$ ` in the console blocks of a page, with continuation lines joined."""
    joined = "".join(blocks("console", text)).replace("\\\n", "")
    return re.findall(r"^\$ (.*)", joined, re.M)


# These commands run in order, since later commands use the output of earlier ones. Tests replace the output directory.
BRING_YOUR_OWN = [command for command in commands() if " runs/" in command]
TRAIN_YOUR_OWN = [command for command in commands() if "checkpoints/mine" in command]
ALONE = [command for command in commands() if command not in (*BRING_YOUR_OWN, *TRAIN_YOUR_OWN)]
RUNNABLE = [command for command in ALONE if command.startswith(("curl", ".venv/bin/kvasir generate"))]
TEXT_ONLY = [c for c in ALONE if c.startswith((".venv/bin/kvasir tokenize", ".venv/bin/kvasir inspect"))]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(CHECKPOINT, tmp_path_factory.mktemp("service")) as running:
        yield running


def shell(command: str, url: str = URL) -> str:
    here = command.replace(URL, url).replace(".venv/bin/kvasir", ".venv/bin/python -m service.cli")
    here = here.replace(".venv/bin/python", shlex.quote(sys.executable))
    done = subprocess.run(
        here, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNNABLE)
def test_commands_that_need_the_model(service: Service, command: str) -> None:
    output = shell(command, service.url)
    assert output.strip()
    assert '"error"' not in output


@pytest.mark.slow
def test_the_chat_command_returns_a_reply(service: Service) -> None:
    """A chat completion has words and ends with a stop token."""
    (command,) = [command for command in RUNNABLE if "/v1/chat/completions" in command]
    (choice,) = json.loads(shell(command, service.url))["choices"]
    assert choice["message"]["role"] == "assistant"
    assert re.search(r"[a-z]{2}", choice["message"]["content"])
    assert choice["finish_reason"] == "stop"


@pytest.mark.slow
def test_the_streaming_command_returns_token_by_token(service: Service) -> None:
    (command,) = [command for command in RUNNABLE if '"stream": true' in command]
    *events, end = shell(command, service.url).strip().split("\n\n")
    assert end == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert sum(text != "" for text in texts) > 50


@pytest.mark.parametrize("command", TEXT_ONLY)
def test_commands_that_need_no_service(command: str) -> None:
    assert shell(command).strip()


@pytest.mark.slow
def test_the_commands_for_an_own_checkpoint(tmp_path: Path) -> None:
    commands = [re.sub(r"(?<=[ =])runs/", f"{shlex.quote(str(tmp_path))}/", command) for command in BRING_YOUR_OWN]
    served = [words for command in commands if (words := shlex.split(command))[1:3] == ["serve", "--checkpoint"]]
    assert commands[0].startswith(".venv/bin/kvasir convert")
    for command in commands:
        if shlex.split(command) not in served:
            assert shell(command).strip()
    assert [Path(words[3]).name for words in served] == ["kvasir-int4", "kvasir.gguf", "kvasir-hf"]
    for words in served:
        with serving(Path(words[3]), tmp_path, *words[4:]) as running:
            names = [card["id"] for card in running.get("/v1/models").json()["data"]]
            assert names[1:] == (["mine"] if "--lora" in words else [])
            texts = [
                running.text("The king had three sons.", model=name, max_tokens=30, temperature=0) for name in names
            ]
            assert all(texts)
            assert len(set(texts)) == len(names)


@pytest.mark.slow
def test_training_on_own_text_prints_the_lines_of_the_readme(tmp_path: Path) -> None:
    """Compare the output up to the vocabulary: later lines depend on the machine, and take the full time limit."""
    shown = README[README.index(f"$ {TRAIN_YOUR_OWN[0]}\n") :].splitlines()[1:3]
    assert [line.split(":")[0] for line in shown] == ["text", "vocabulary"]
    trained = TRAIN_YOUR_OWN[0].replace("checkpoints/mine", shlex.quote(str(tmp_path / "mine")))
    words = [*shlex.split(trained)[1:], "--run-directory", str(tmp_path / "run")]
    program = [sys.executable, "-u", "-m", "service.cli", *words]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().rstrip("\n") for _ in shown]
        process.kill()
    assert said == shown


def test_the_recipe_in_training_md_equals_the_file() -> None:
    (recipe,) = blocks("toml", TRAINING)
    assert recipe == (ROOT / "model" / "training" / "configs" / "tales.toml").read_text()


@pytest.mark.slow
def test_a_model_trained_by_training_md_generates_and_is_served(tmp_path: Path) -> None:
    """It trains for fewer steps here: tests/model/training/test_proof.py compares the losses of the whole run.

    The commands of README.md for an own model use it, too: tests/service/cli/test_train_own_text.py trains that one.
    """
    trained, generated = [c.replace(" runs/", f" {shlex.quote(str(tmp_path))}/") for c in commands(TRAINING)]
    said = shell(f"{trained} --steps 24 --run-directory {shlex.quote(str(tmp_path / 'tales'))}")
    assert "held out, grimm: " in said
    assert shell(generated).strip()
    model = shlex.quote(str(tmp_path / "tales-model"))
    _, generated, served = [command.replace("checkpoints/mine", model) for command in TRAIN_YOUR_OWN]
    assert shell(generated).strip()
    words = shlex.split(served)
    with serving(Path(words[3]), tmp_path, *words[4:]) as running:
        assert running.text("The king had three sons.", max_tokens=20, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples(service: Service, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code.replace(URL, service.url), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_readme_has_commands_of_each_kind() -> None:
    assert len(RUNNABLE) >= 3
    assert len(TEXT_ONLY) >= 1
    assert len(BRING_YOUR_OWN) >= 3
    assert any("chat.completions.create" in code for code in blocks("python"))


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        named = set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", page.read_text(), re.M))
        assert named <= targets, f"{page.name}: {named - targets}"


def test_kvasir_commands_exist() -> None:
    for page in PAGES:
        named = set(re.findall(r"(?:^\$ (?:\.venv/bin/)?|`)kvasir ([a-z]+(?:-[a-z]+)*)", page.read_text(), re.M))
        assert named <= set(COMMANDS), f"{page.name}: {named - set(COMMANDS)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_name_existing_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_figures_of_the_readme_equal_the_performance_page() -> None:
    """Compare streams, engine, HTTP, ratio, TTFT and ITL of each table row, with the rounding of README.md."""
    page = (ROOT / "docs" / "performance.md").read_text()
    measured = {}
    for row in re.findall(
        r"^\| (\d+) \| ([\d.]+) \(.*?\) \| ([\d.]+) \(.*?\) \| ([\d.]+) \(.*?\) \| (.*)$", page, re.M
    ):
        streams, http, engine, ratio, rest = row
        ttft, itl = (float(cell.split("/")[0]) for cell in rest.split("|")[:2])
        measured[streams] = [float(engine), float(http), float(ratio), ttft, itl]
    shown = re.findall(r"^\| (\d+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \| (\d+) ms \| ([\d.]+) ms \|$", README, re.M)
    assert [streams for streams, *_ in shown] == ["1", "4", "16", "64"]
    for streams, *cells in shown:
        assert [float(cell.replace(",", "")) for cell in cells] == pytest.approx(measured[streams], abs=0.51)
    first_token = re.search(r"From start to the first token \| .*? \| ([\d.]+) ", page)
    memory = re.search(r"API process, resident memory under load \| .*? \| (\d+) MB", page)
    assert first_token is not None
    assert memory is not None
    assert f"From start to first token {float(first_token[1]):.1f} s pass" in README
    assert f"no torch and {memory[1]} MB" in README
