"""How to call us again, in commands that are printed to be copied."""

import shutil
import sys
from pathlib import Path


def program() -> str:
    """`kvasir` where the shell finds that one, else the path by which this process was called."""
    called = sys.argv[0]
    return called if Path(called).name == "kvasir" and shutil.which("kvasir") != called else "kvasir"
