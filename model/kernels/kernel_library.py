"""Kernel library of this machine: compile it if it is missing, and load it."""

import ctypes
import logging
import os
from pathlib import Path
from typing import Any

from model.kernels.build import SHIPPED, BuildError, build, find_built
from model.kernels.cpu_features import CpuLevel, levels_here

logger = logging.getLogger(__name__)

# A function that identifies a kernel library: every one exports it.
_MARK = "kvasir_inputs_side_by_side"


class KernelLibrary:
    """Loaded kernel library of one level.

    Raises:
        OSError: the file cannot be loaded, or is not a kernel library.
    """

    def __init__(self, path: Path, level: CpuLevel) -> None:
        self.level = level.name
        self._library = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}
        if not hasattr(self._library, _MARK):
            raise OSError(f"{path} is not a kernel library: it has no {_MARK}")

    def function(self, name: str, *argument_types: Any, result: Any = None) -> Any:
        """Return a kernel by its C name. The types of the first call for a name apply to all later calls.

        Raises:
            AttributeError: the library has no kernel of that name.
        """
        found = self._functions.get(name)
        if found is None:
            found = getattr(self._library, name)
            found.argtypes, found.restype = argument_types, result
            self._functions[name] = found
        return found


def load_kernels(cache: Path) -> KernelLibrary:
    """Load the kernel library built for this machine, or compile it into the directory `cache` first.

    Compiling takes 10 to 40 s, once for a machine.

    Raises:
        BuildError: no level supports this CPU, or the library cannot be compiled or loaded. The message is one line.
    """
    level, cache = next(iter(levels_here()), None), Path(os.path.expanduser(cache))
    if level is None:
        raise BuildError("the native kernels do not support this CPU: they need AVX2, FMA and F16C")
    path = find_built(level, (SHIPPED, cache))
    if path is None:
        logger.info("compiling native kernels for %s in %s: up to a minute, once for this machine", level.name, cache)
        path = build(level, cache)
    try:
        library = KernelLibrary(path, level)
    except OSError as error:
        raise BuildError(
            f"{path} cannot be loaded: {error}; delete the file, and the next start compiles it again"
        ) from error
    logger.info("native kernels for %s loaded from %s", level.name, path)
    return library
