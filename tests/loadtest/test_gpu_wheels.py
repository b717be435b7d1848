"""Wheels that the suite of a GPU machine needs: complete, and pinned."""

import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.gpu.wheels import needed_distributions

ROOT = Path(__file__).parents[2]
# In a process that has imported nothing else.
PROGRAM = "from pathlib import Path; from loadtest.gpu.wheels import *; print(*download_command(Path('wheels')))"


@pytest.mark.slow
def test_the_download_takes_pinned_wheels_alone_of_what_the_suite_loads() -> None:
    command = [sys.executable, "-c", PROGRAM]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {"--no-deps", "--only-binary=:all:", "manylinux_2_31_x86_64"} <= set(printed)
    downloaded = printed[printed.index("wheels") + 1 :]
    assert all("==" in name for name in downloaded)
    names = {name.partition("==")[0] for name in downloaded}
    assert {"msgspec", "llguidance", "tiktoken", "hypothesis", "pytest", "pytest-xdist", "pydantic-core"} <= names
    assert not {"torch", "triton", "numpy", "jinja2", "sympy", "kvasir"} & names


def test_the_dependencies_of_a_package_come_with_it() -> None:
    assert "pydantic-core" in needed_distributions({"pydantic"})
    assert not {"torch", "triton", "numpy"} & needed_distributions({"torch", "numpy"})
