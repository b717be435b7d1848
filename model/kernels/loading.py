"""The native kernels of this process: loaded where they are built, else compiled and then loaded."""

import ctypes
import logging
import os
from pathlib import Path
from typing import Any

from model.kernels.build import SHIPPED, BuildError, build, find_built
from model.kernels.levels import Level, levels_here

logger = logging.getLogger(__name__)

# A function that every library of ours has.
_MARK = "kvasir_inputs_side_by_side"


class KernelLibrary:
    """Loaded kernels of one level.

    Raises:
        OSError: the file is no library of ours.
    """

    def __init__(self, path: Path, level: Level) -> None:
        self.level = level.name
        self._library = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}
        if not hasattr(self._library, _MARK):
            raise OSError(f"{path} has no {_MARK}")

    def function(self, name: str, *argument_types: Any, result: Any = None) -> Any:
        """A kernel by its name in C. Argument and result types are those of the first call for it.

        Raises:
            AttributeError: there is none of that name.
        """
        found = self._functions.get(name)
        if found is None:
            found = getattr(self._library, name)
            found.argtypes, found.restype = argument_types, result
            self._functions[name] = found
        return found


class Kernels:
    """The native kernels of a process.

    Attributes:
        loaded: the library; None before `prepare`, and where none can be had.
        trouble: the reason there is none, in one line; None while there is no trouble.
    """

    def __init__(self) -> None:
        self.loaded: KernelLibrary | None = None
        self.trouble: str | None = None

    def prepare(self, cache: Path) -> None:
        """Load the library built for this machine; compile it into `cache` first where it is missing.

        Compiling takes 10 to 40 s, once for a machine. Nothing is raised: without a library `loaded` stays None,
        PyTorch's kernels serve, and one warning gives the reason.
        """
        if self.loaded is not None or self.trouble is not None:
            return
        level, cache = levels_here()[0], Path(os.path.expanduser(cache))
        built = find_built(level, (SHIPPED, cache))
        if built is not None:
            self._load(built, level)
        if self.loaded is None:
            logger.info(
                "compiling native kernels for %s in %s: up to a minute, once for this machine", level.name, cache
            )
            try:
                self._load(build(level, cache), level)
            except BuildError as error:
                self.trouble = str(error)
                logger.warning("no native kernels, PyTorch's kernels serve: %s", error)

    def _load(self, path: Path, level: Level) -> None:
        try:
            self.loaded, self.trouble = KernelLibrary(path, level), None
        except OSError as error:
            self.trouble = f"{path} cannot be loaded: {error}"
            logger.warning("%s", self.trouble)
        else:
            logger.info("native kernels for %s loaded from %s", level.name, path)


KERNELS = Kernels()
