"""The kernels of every level that this machine can run, compiled once and kept where a service keeps them."""

import functools
import shutil

from model.kernels import build as build_module
from model.kernels.build import SHIPPED, build, find_built
from model.kernels.levels import levels_here, runnable_levels
from model.kernels.loading import KernelLibrary

CACHE = build_module.CACHE.expanduser()
# The one that serves here first. Empty on a machine without a compiler: PyTorch's way is all there is, and is tested.
BUILDABLE = {
    level.name: level
    for level in dict.fromkeys((*levels_here(), *runnable_levels()))
    if shutil.which("c++") or find_built(level, (SHIPPED, CACHE))
}


@functools.cache
def library_of(name: str) -> KernelLibrary:
    level = BUILDABLE[name]
    return KernelLibrary(find_built(level, (SHIPPED, CACHE)) or build(level, CACHE), level)
