"""SIGINT at a chosen point of a test: a sitecustomize module sends it when the process imports a given module."""

import os
from pathlib import Path

VARIABLE = "INTERRUPT_AT_IMPORT_OF"
_HOOK = f"""
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("{VARIABLE}"):
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


def interrupting_environment(directory: Path, module: str) -> dict[str, str]:
    """Return environment variables under which a Python process interrupts itself on importing the module."""
    (directory / "sitecustomize.py").write_text(_HOOK)
    paths = [str(directory), os.environ.get("PYTHONPATH", "")]
    return {VARIABLE: module, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
