"""Native kernels of this process: load the library for this machine, and compile it first if necessary."""

import ctypes
import logging
import os
from pathlib import Path
from typing import Any

from model.kernels.build import SHIPPED, BuildError, build, find_built
from model.kernels.cpu_features import Level, levels_here

logger = logging.getLogger(__name__)

# A function that identifies a kernel library: every one exports it.
_MARK = "kvasir_inputs_side_by_side"


class KernelLibrary:
    """Loaded kernel library of one level.

    Raises:
        OSError: the file cannot be loaded, or is not a kernel library.
    """

    def __init__(self, path: Path, level: Level) -> None:
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


class Kernels:
    """Native kernels of a process.

    Attributes:
        loaded: the library; None before `prepare`, or if it cannot be built or loaded.
        trouble: the reason why there is no library, in one line; None: no failure so far.
    """

    def __init__(self) -> None:
        self.loaded: KernelLibrary | None = None
        self.trouble: str | None = None

    def prepare(self, cache: Path) -> None:
        """Load the library built for this machine, or compile it into `cache` first.

        Compiling takes 10 to 40 s, once for a machine. Failures are not raised: `loaded` stays None, a warning gives
        the reason, and PyTorch's kernels are used instead.
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
