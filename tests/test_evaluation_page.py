"""Check docs/evaluation.md: its command prints its table, its flags exist, and its lm-eval numbers match."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from service.config.flags import flag_of
from service.config.training_settings import EvalSettings

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "evaluation.md").read_text()


def rows(text: str) -> list[list[str]]:
    """Return the cells of each row of the tables in a text, which are drawn with │."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


@pytest.mark.slow
def test_the_command_prints_the_table(tmp_path: Path) -> None:
    (command,) = re.findall(r"^\$ \.venv/bin/kvasir (.*)$", PAGE, re.M)
    words = [sys.executable, "-m", "service.cli", *shlex.split(command), "--device", "cpu"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown, printed = rows(PAGE), rows(done.stdout)[: len(rows(PAGE))]
    assert [row[:3] for row in printed] == [row[:3] for row in shown]
    for row, expected in zip(printed, shown, strict=True):
        losses, shown_losses = ([float(cell) for cell in cells[3:5]] for cells in (row, expected))
        assert losses == pytest.approx(shown_losses, abs=2e-4)
        assert float(row[5].rstrip("%")) == pytest.approx(float(expected[5].rstrip("%")), abs=0.05)


def test_flags_on_the_page_exist() -> None:
    of_others = {
        "--model",
        "--model_args",
        "--include_path",
        "--tasks",
        "--log_samples",
        "--output_path",
        "--batch_size",
        "--no-parse-special",
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", PAGE)) - of_others - {"--help"}
    flags = {flag_of(name) for name in EvalSettings.model_fields}
    assert named <= flags
    assert {"--config", "--texts", "--pairs", "--samples", "--out", "--documents", "--export-tasks"} <= named
