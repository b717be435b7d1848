"""Download the wheels that loadtest/gpu/suite.sh needs on a GPU machine without internet access, into a folder.

    python -m loadtest.gpu.wheels FOLDER

The machine has Python 3.12, and the packages in `PRESENT`. All other packages that are loaded with the suite's modules,
and their dependencies, are downloaded in the versions of requirements/dev.txt.
"""

import argparse
import importlib
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).parents[2]
# Packages of the machine, whose dependencies it has too.
PRESENT: Final = frozenset({"torch", "triton", "numpy"})
# Programs that the suite starts, and the plugin for parallel tests, which no module imports. bench_transformers is not
# listed: it also needs transformers, which the machine has; without transformers, its part of the suite fails alone.
ENTRIES: Final = ("loadtest/inprocess/bench_command.py", "loadtest/inprocess/bench_engine.py", "tests/conftest.py")
_PLUGINS = ("pytest", "pytest-xdist")
# Oldest C library of the machine; a wheel of an older one works too.
_PLATFORMS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_17", "manylinux2014")


def suite_files() -> list[Path]:
    """Return the files that the suite runs: its benchmarks, and the tests that need a GPU."""
    tests = (_ROOT / "tests" / "gpu").glob("test_*.py")
    return [*(_ROOT / name for name in ENTRIES), *(path for path in tests if "mark.gpu" in path.read_text())]


def loaded_packages() -> set[str]:
    """Import what the suite runs, and return the top-level names of all modules that are loaded then."""
    for path in suite_files():
        importlib.import_module(".".join(path.relative_to(_ROOT).with_suffix("").parts))
    return {name.partition(".")[0] for name in sys.modules}


def needed_distributions(packages: set[str]) -> set[str]:
    """Return the distributions of packages and of their dependencies, without those that the machine has."""
    names, distributions = packages_distributions(), set[str]()
    waiting = [*_PLUGINS, *(names[package][0] for package in packages & names.keys())]
    # pydantic needs a newer typing_extensions than torch.
    present = PRESENT | {"kvasir", *map(canonicalize_name, _dependencies("torch"))} - {"typing-extensions"}
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in distributions | present:
            distributions.add(name)
            waiting += _dependencies(name)
    return distributions


def _dependencies(name: str) -> list[str]:
    environment = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.0"}
    parsed = map(Requirement, requires(name) or ())
    return [each.name for each in parsed if each.marker is None or each.marker.evaluate(environment)]


def requirements() -> list[str]:
    """Return the distributions to download, each with its version, such as "msgspec==0.22.0"."""
    pinned = re.findall(r"^([\w.-]+)==(\S+)", (_ROOT / "requirements/dev.txt").read_text(), re.MULTILINE)
    versions = {canonicalize_name(name): version for name, version in pinned}
    names = needed_distributions(loaded_packages())
    return [f"{name}=={versions[canonicalize_name(name)]}" for name in sorted(names)]


def download_command(folder: Path) -> list[str]:
    """Return the command that downloads the wheels of Python 3.12 on x86-64 Linux to a folder."""
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    options = ("--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--quiet")
    return [sys.executable, "-m", "pip", "download", *options, *platforms, "--dest", str(folder), *requirements()]


def main() -> int:
    """Download the wheels. Return pip's exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.wheels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder for the wheels; created if it is missing")
    folder: Path = parser.parse_args().folder
    code = subprocess.run(download_command(folder), check=False).returncode
    size = sum(path.stat().st_size for path in folder.glob("*.whl")) / 1e6
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size:.1f} MB, in {folder}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
