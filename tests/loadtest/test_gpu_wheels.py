"""Wheels that the suite of a GPU machine needs: complete, and pinned."""

import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from loadtest.gpu.wheels import PRESENT, download_command, needed_distributions, requirements, suite_files

# Imports the modules in argv[2:], and prints the top-level names of all modules that were loaded for them.
_PROGRAM = """
import sys, importlib
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]: importlib.import_module(name)
print(*{name.partition(".")[0] for name in sys.modules})
"""


@pytest.mark.slow
def test_the_suite_imports_only_packages_of_the_machine_and_of_the_folder() -> None:
    root = Path(__file__).parents[2]
    modules = [".".join(path.relative_to(root).with_suffix("").parts) for path in suite_files()]
    command = [sys.executable, "-c", _PROGRAM, str(root), *modules]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    names = packages_distributions()
    found = {canonicalize_name(names[name][0]) for name in loaded if name in names}
    downloaded = {requirement.partition("==")[0] for requirement in requirements()}
    of_torch = ["sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec", "setuptools", "dill"]
    assert {"torch", "msgspec", "llguidance", "tiktoken", "hypothesis", "pytest"} <= found, "the modules were imported"
    assert found - downloaded - PRESENT <= {*of_torch, "kvasir"}


def test_the_download_takes_wheels_alone_for_the_machine() -> None:
    command = download_command(Path("wheels"))
    assert {"--no-deps", "--only-binary=:all:", "manylinux_2_31_x86_64"} <= set(command)
    downloaded = command[command.index("wheels") + 1 :]
    assert downloaded
    assert all("==" in name for name in downloaded)
    assert "pydantic-core" in needed_distributions({"pydantic"})
    assert not {"torch", "triton", "numpy"} & needed_distributions({"torch", "numpy"})
