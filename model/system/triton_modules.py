"""Import of modules with Triton kernels at their first use: importing Triton takes 0.17 s, and CPUs do not need it."""

import importlib
from types import ModuleType


def import_with_triton(name: str) -> ModuleType | None:
    """Import and return a module with Triton kernels; None without triton, which PyTorch for CUDA installs."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("triton", name):
            raise
        return None
