"""Where the clients live, and how a program is run beside one of them."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.process import clean_environment

ROOT = Path(__file__).parents[2]
CHECKPOINT = min((ROOT / "checkpoints").glob("*/manifest.json")).parent  # any that ships
PAGE = ROOT / "docs" / "clients.md"
PROGRAMS = Path(__file__).parent / "programs"
# As the page has them.
URL = "http://127.0.0.1:8000"
MODEL = "demo"
# Of the service that asks for one.
KEY = "sk-clients-0123456789abcdef"
_ENVIRONMENTS = ROOT / ".venv-clients"
# Nothing is fetched, and nobody is told: what some of the clients do unless they are asked not to.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "NO_PROXY": "127.0.0.1",
}


def snippet(client: str, language: str) -> str:
    """The block in this language under the page's heading of that name."""
    text = PAGE.read_text()
    section = re.search(rf"^## {re.escape(client)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert section is not None, f"{PAGE.name} has no section {client}"
    block = re.search(rf"^```{language}\n(.*?)^```", section[1], re.M | re.S)
    assert block is not None, f"{client} has no {language} block"
    return block[1]


def python_arguments(environment: str, name: str) -> str:
    """An executable of a client's environment; `own` is the one the tests run in."""
    if environment == "own":
        return sys.executable
    path = _ENVIRONMENTS / environment / "bin" / name
    assert path.exists(), f"{path.relative_to(ROOT)} is not there: the clients are installed by `make test-clients`"
    return str(path)


def node(directory: Path) -> str:
    """The node executable; programs in `directory` can import what was installed for it."""
    path = shutil.which("node")
    assert path is not None, "Node.js is needed for its client: install `node` and `npm`, then `make test-clients`"
    modules = _ENVIRONMENTS / "node" / "node_modules"
    assert modules.is_dir(), f"{modules.relative_to(ROOT)} is not there: `make test-clients` installs it, with npm"
    (directory / "node_modules").symlink_to(modules)
    return path


def run(words: Sequence[object], home: Path, *, seconds: float = 300, **variables: str) -> str:
    """What a program prints. It must succeed, and finds nobody's settings but those in `home`."""
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
