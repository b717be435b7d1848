"""`kvasir inspect attention`: summary, picture, and one-line errors."""

from collections.abc import Callable
from pathlib import Path

import pytest

from service.cli.main import main

Run = Callable[..., tuple[int, str, str]]
PROMPT = "the theatre in an inn"


@pytest.fixture
def run(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `kvasir inspect attention` on the tiny model. Returns exit code, stdout and stderr."""

    def run_attention(*argv: object) -> tuple[int, str, str]:
        code = main(["inspect", "attention", "--checkpoint", str(tiny_checkpoint), *map(str, argv)])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run_attention


def test_summary_and_picture_of_all_heads(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "attention.png"
    code, told, err = run("--prompt", PROMPT, "--layer", 1, "--head", "all", "--out", out)
    assert (code, err) == (0, "")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert told.startswith("layer 1, mean of 4 heads, then each head's top token; the last 12 of ")
    assert "3: " in told
    assert told.rstrip().endswith(f"wrote the heat maps to {out}")


def test_summary_of_one_head_without_picture(run: Run) -> None:
    code, told, _ = run("--prompt", "a", "--layer", 0, "--head", 3)
    assert code == 0
    assert told == "layer 0, head 3; the last 1 of 1 tokens\n    0  a  a 100 %\n"


def test_a_prompt_of_any_characters_is_shown(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "a.svg"
    code, told, _ = run("--prompt", "\x01\n你🦊\u202e $x$", "--layer", 0, "--out", out)
    assert code == 0
    assert "^A" in told
    assert "⟨" in told
    assert out.exists()


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("--layer", 2), "--layer 2: the model has layers 0 to 1"),
        (("--layer", -1), "--layer: must be greater than or equal to 0, not '-1'"),
        (("--layer", 0, "--head", 4), "--head must be `all` or from 0 to 3, not '4'"),
        (("--layer", 0, "--head", "x"), "--head must be `all` or from 0 to 3, not 'x'"),
        (("--layer", 0, "--head", "²"), "--head must be `all` or from 0 to 3, not '²'"),
        (("--layer", 0, "--head", "-1"), "--head must be `all` or from 0 to 3, not '-1'"),
        (
            ("--layer", 0, "--out", "a.jpg"),
            "--out: must be a picture file that ends in .png, .svg or .pdf, not 'a.jpg'",
        ),
        (
            ("--layer", 0, "--out", "nowhere/a.png"),
            "--out: must be a file that can be written, in an existing directory, not 'nowhere/a.png'",
        ),
        ((), "--layer is needed (or KVASIR_LAYER)"),
        (
            ("--layer", 0, "--prompt", "z" * 300),
            "--prompt: 300 tokens exceed the model's context of 256; shorten the prompt",
        ),
        (
            ("--layer", 0, "--prompt", "z" * 65, "--out", "a.png"),
            "--prompt: 65 tokens, but a picture shows at most 64; shorten the prompt or omit --out",
        ),
    ],
)
def test_invalid_arguments_cause_a_one_line_error(
    run: Run, argv: tuple[object, ...], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, told, err = run("--prompt", PROMPT, *argv)
    assert (code, told) == (2, "")
    assert err == f"kvasir inspect attention: {complaint}\n"


def test_a_picture_without_matplotlib_is_rejected_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, told, err = run("--prompt", PROMPT, "--layer", 0, "--out", tmp_path / "a.png")
    assert (code, told) == (2, "")
    assert err == (
        "kvasir inspect attention: --out needs matplotlib, which is not installed; run `pip install matplotlib`\n"
    )


def test_a_directory_as_picture_path_is_rejected(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    code, _, err = run("--prompt", PROMPT, "--layer", 0, "--out", tmp_path / "a.png")
    assert code == 2
    assert err.startswith(
        "kvasir inspect attention: --out: must be a file that can be written, in an existing directory, not"
    )


def test_a_missing_checkpoint_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "attention", str(tmp_path / "none"), "--prompt", PROMPT, "--layer", "0"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"kvasir inspect attention: {tmp_path / 'none'}: no such directory")
    assert err.count("\n") == 1
