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
BARE, WHOLE = ["serve.txt", "plots.txt", "torch.txt", "--editable ."], ["dev.txt"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return a checkout without an environment."""
    (tmp_path / "requirements").mkdir()
    for path in (ROOT / "Makefile", ROOT / "pyproject.toml", *(ROOT / "requirements").iterdir()):
        copied = shutil.copy(path, tmp_path / path.relative_to(ROOT))
        os.utime(copied, (100, 100))
    return tmp_path


def installed(target: str, here: Path) -> list[str]:
    """Return the lock files that a target installs. pip checks the hashes of all but torch's."""
    done = subprocess.run(["make", "-n", target], cwd=here, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if "pip install" in line]
    for line in lines:
        assert "--require-hashes --no-deps" in line or line.endswith(("--editable .", "requirements/torch.txt"))
    return [name for line in lines for name in re.findall(r"\w+\.txt|--editable \.", line)]


@pytest.mark.parametrize(
    ("stamps", "to_serve", "to_test"),
    [
        ({}, BARE, BARE + WHOLE),
        ({".serving": 200}, [], WHOLE),
        ({".serving": 200, ".installed": 201}, [], []),
        ({".serving": 50, ".installed": 51}, BARE, BARE + WHOLE),  # older than pyproject.toml
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


def locked(name: str) -> dict[str, str]:
    """Return the versions in a lock file, each of which has hashes."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert "//" not in text, "an index"
    entries = re.split(r"\n(?! )", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip())
    assert all("--hash=sha256:" in entry for entry in entries)
    return dict(entry.split(" ")[0].split("==") for entry in entries)


def test_lock_files_hold_all_dependencies_in_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        "serve": [*project["dependencies"], *extras["traces"], *extras["kv-events"], "setuptools"],
        "plots": extras["plots"],
        "loadtest": extras["loadtest"],
        "dev": [*project["dependencies"], *(requirement for group in extras.values() for requirement in group)],
        "tools": ["cyclonedx-bom", "pip-audit", "uv"],
    }
    for name, requirements in wanted.items():
        declared = {canonical(requirement) for requirement in requirements} - {"kvasir", "torch"}
        assert declared <= locked(name).keys()
        if name != "tools":
            assert locked(name).items() <= locked("dev").items()
    assert "torch" not in locked("loadtest")


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
