"""Makefile targets: serving installs less than testing, and neither target undoes the other."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BARE, WHOLE = "--editable '.[plots]'", "--editable '.[dev]'"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return a checkout without an environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
        os.utime(tmp_path / name, (100, 100))
    return tmp_path


def installed(target: str, here: Path) -> list[str]:
    """Return the arguments that a target passes to pip."""
    done = subprocess.run(["make", "-n", target], cwd=here, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if "pip install" in line]
    return [line[line.index("--editable") :] for line in lines]


@pytest.mark.parametrize(
    ("stamps", "to_serve", "to_test"),
    [
        ({}, [BARE], [BARE, WHOLE]),
        ({".serving": 200}, [], [WHOLE]),
        ({".serving": 200, ".installed": 201}, [], []),
        ({".serving": 50, ".installed": 51}, [BARE], [BARE, WHOLE]),  # older than pyproject.toml
    ],
)
def test_each_target_installs_what_it_lacks(
    here: Path, stamps: dict[str, int], to_serve: Sequence[str], to_test: Sequence[str]
) -> None:
    (here / ".venv").mkdir()
    for name, when in stamps.items():
        (here / ".venv" / name).touch()
        os.utime(here / ".venv" / name, (when, when))
    assert installed("serve", here) == to_serve
    assert installed("test", here) == to_test


def test_an_installation_says_that_it_takes_a_while(here: Path) -> None:
    done = subprocess.run(["make", "-n", "serve"], cwd=here, capture_output=True, text=True, check=True)
    said, begun = done.stdout.index("some minutes, once"), done.stdout.index("pip install")
    assert said < begun
