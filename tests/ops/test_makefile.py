"""Makefile targets: serving installs less than testing, and neither target undoes the other."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions
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


def test_an_installation_prints_that_it_takes_a_while(here: Path) -> None:
    done = subprocess.run(["make", "-n", "serve"], cwd=here, capture_output=True, text=True, check=True)
    said, begun = done.stdout.index("some minutes, once"), done.stdout.index("pip install")
    assert said < begun


def canonical(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def test_every_declared_dependency_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [requirement for group in project["optional-dependencies"].values() for requirement in group]
    declared = {canonical(requirement) for requirement in (*project["dependencies"], *extras)} - {"kvasir"}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.!+-]+", line) for line in lines)
    assert declared <= {canonical(line) for line in lines}


def test_every_import_is_a_declared_dependency() -> None:
    """Packages that are only installed as dependencies of others may be missing after an update."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {canonical(requirement) for requirement in project["dependencies"]}
    distributions = packages_distributions()
    imported = {
        name.partition(".")[0]
        for package in ("model", "service")
        for path in (ROOT / package).rglob("*.py")
        for name in imports(ast.parse(path.read_text()))
    }
    foreign = imported - set(sys.stdlib_module_names) - {"model", "service", "loadtest"}
    optional = {"matplotlib", "opentelemetry", "zmq", "triton"}  # three extras; a part of PyTorch's builds for GPUs
    owners = {name: {canonical(owner) for owner in distributions[name]} for name in foreign - optional}
    assert [name for name, found in owners.items() if not found & declared] == []


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
