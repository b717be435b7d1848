"""The kernels in this process: loaded at once where they are built, else built in a thread and then loaded."""

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.kernels.build import SHIPPED, BuildError, build, find_built
from model.kernels.levels import Level, levels_here

logger = logging.getLogger(__name__)

# What every library of ours has.
_MARK = "kvasir_inputs_side_by_side"


class KernelLibrary:
    """A level's kernels, loaded.

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
    """What a process has of them. `loaded` is None until they are loaded; every thread may read it at any time.

    `serves`: whether they compute all of a model, of which who runs it tells by `serve`.

    `trouble` says in a line why there are none and will be none.
    """

    def __init__(self) -> None:
        self.loaded: KernelLibrary | None = None
        self.trouble: str | None = None
        self.serves = False
        self._lock = threading.Lock()
        self._builder: threading.Thread | None = None
        self._told: list[Callable[[], None]] = []

    def prepare(self, cache: Path, *, wait: bool) -> None:
        """Load what is built for this machine; else build it in `cache`, and load it then.

        Args:
            wait: return when that has been done or has failed. Else return at once: a thread compiles.

        Nothing is raised: who finds no library goes PyTorch's way, and one line of the log says why.
        """
        with self._lock:
            if self.loaded is None and self._builder is None:
                level, cache = levels_here()[0], Path(os.path.expanduser(cache))
                built = find_built(level, (SHIPPED, cache))
                if built is not None:
                    self._load(built, level)
                if self.loaded is None:
                    logger.info("no kernels are built for %s: compiling them in %s", level.name, cache)
                    self._builder = threading.Thread(
                        target=self._build, args=(level, cache), name="kernels", daemon=True
                    )
                    self._builder.start()
            builder = self._builder
        if wait and builder is not None:
            builder.join()

    def when_serving(self, told: Callable[[], None]) -> None:
        """Call this once they compute all of a model: now, or from the thread that has it compute so."""
        with self._lock:
            if not self.serves:
                self._told.append(told)
                return
        told()

    def serve(self) -> None:
        """They compute all of a model from now on."""
        with self._lock:
            self.serves, told, self._told = True, self._told, []
        for each in told:
            each()

    def _build(self, level: Level, cache: Path) -> None:
        try:
            path = build(level, cache)
        except BuildError as error:
            self.trouble = str(error)
            logger.warning("no kernels of our own, PyTorch's serve: %s", error)
            return
        with self._lock:
            self._load(path, level)

    def _load(self, path: Path, level: Level) -> None:
        try:
            self.loaded = KernelLibrary(path, level)
        except OSError as error:
            self.trouble = f"{path} cannot be loaded: {error}"
            logger.warning("%s", self.trouble)
        else:
            logger.info("kernels for %s loaded from %s", level.name, path)


KERNELS = Kernels()
