"""Environments of the clients: their executables, the snippets of docs/clients.md, and running a program in one."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.process import clean_environment

ROOT = Path(__file__).parents[2]
CHECKPOINT = min((ROOT / "checkpoints").glob("*/manifest.json")).parent  # any shipped checkpoint
PAGE = ROOT / "docs" / "clients.md"
PROGRAMS = Path(__file__).parent / "programs"
# As in docs/clients.md.
URL = "http://127.0.0.1:8000"
MODEL = "demo"
# API key of the service that requires one.
KEY = "sk-clients-0123456789abcdef"
_ENVIRONMENTS = ROOT / ".venv-clients"
# Some clients download files or send usage data unless these variables are set.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "NO_PROXY": "127.0.0.1",
}


def snippet(client: str, language: str) -> str:
    """Return the first code block in this language in the section of docs/clients.md about this client."""
    text = PAGE.read_text()
    section = re.search(rf"^## {re.escape(client)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert section is not None, f"{PAGE.name} has no section {client}"
    block = re.search(rf"^```{language}\n(.*?)^```", section[1], re.M | re.S)
    assert block is not None, f"{client} has no {language} block"
    return block[1]


def executable(environment: str, name: str) -> str:
    """Return the path of an executable in a client's environment. `own` is the environment of the tests: its Python."""
    if environment == "own":
        return sys.executable
    path = _ENVIRONMENTS / environment / "bin" / name
    assert path.exists(), f"{path.relative_to(ROOT)} is missing; install the clients with `make test-clients`"
    return str(path)


def node(directory: Path) -> str:
    """Return the path of node. Programs in `directory` can then import the installed packages."""
    path = shutil.which("node")
    assert path is not None, "Node.js is missing; install `node` and `npm`, then run `make test-clients`"
    modules = _ENVIRONMENTS / "node" / "node_modules"
    assert modules.is_dir(), (
        f"{modules.relative_to(ROOT)} is missing; install it with `make test-clients`, which needs npm"
    )
    (directory / "node_modules").symlink_to(modules)
    return path


def run(words: Sequence[object], home: Path, *, seconds: float = 300, **variables: str) -> str:
    """Run a program, which must succeed, with `home` as its home directory. Return its standard output."""
    environment = {
        **clean_environment(),
        **_QUIET,
        "HOME": str(home),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **variables,
    }
    done = subprocess.run(
        [*map(str, words)], cwd=home, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    return done.stdout
