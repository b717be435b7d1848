"""Ctrl-C during imports: exit code 130 without output."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from service.cli.__main__ import main
from service.cli.main import INTERRUPTED
from tests.e2e.process import START_SECONDS
from tests.interrupted import interrupting_environment

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "checkpoints" / "kvasir-20m"
# A command, and a module during whose import SIGINT arrives.
MOMENTS = [
    ("serve", "service.cli.main"),
    ("serve", "pydantic"),
    ("serve", "service.cli.serve"),
    ("generate", "service.cli.generate"),
    ("generate", "torch"),
    ("tokenize", "tiktoken"),
    ("bench", "loadtest.inprocess.bench_engine"),
]


def run(command: str, environment: dict[str, str], *prefix: str) -> subprocess.CompletedProcess[str]:
    checkpoint = ["--checkpoint", str(SHIPPED)]
    words = {"generate": ["--prompt", "x"], "tokenize": ["--text", "x"]}.get(command, [])
    return subprocess.run(
        [*prefix, sys.executable, "-m", "service.cli", command, *checkpoint, *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=START_SECONDS,
    )


@pytest.mark.parametrize(("command", "module"), MOMENTS)
def test_an_interrupt_while_importing_ends_quietly(command: str, module: str, tmp_path: Path) -> None:
    done = run(command, interrupting_environment(tmp_path, module))
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")
    assert INTERRUPTED == 130


def test_the_entry_point_imports_no_other_module_of_the_service_before_ctrl_c_is_handled() -> None:
    code = (
        "import sys, service.cli.__main__; print(*sorted(name for name in sys.modules if name.startswith('service')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["service", "service.cli", "service.cli.__main__"]


def test_ignored_interrupts_stay_ignored(tmp_path: Path) -> None:
    """A shell starts background jobs with SIGINT ignored."""
    environment = interrupting_environment(tmp_path, "service.config.settings")
    done = run("tokenize", environment, "sh", "-c", 'trap "" INT; exec "$@"', "sh")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 is begin-of-text" in done.stdout


def test_the_entry_point_is_the_main_module() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"kvasir": f"{main.__module__}:{main.__name__}"}
