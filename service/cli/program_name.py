"""Name of the `kvasir` program, for command lines that are printed to be copied."""

import shutil
import sys
from pathlib import Path


def program() -> str:
    """Return `kvasir` if the shell finds this program under that name, else the path this process was called by."""
    called = sys.argv[0]
    return called if Path(called).name == "kvasir" and shutil.which("kvasir") != called else "kvasir"
