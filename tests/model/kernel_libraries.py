"""Kernel libraries of every level that this machine can run, compiled once into the usual cache directory."""

import functools
import shutil

from model.attention.backends import ATTENTION_BACKENDS, AttentionBackend
from model.attention.native import NativeAttention
from model.kernels import build as build_module
from model.kernels.build import SHIPPED, build, find_built, levels_here, runnable_levels
from model.kernels.kernel_library import KernelLibrary

CACHE = build_module.CACHE.expanduser()
# The level that a service on this machine would use; empty without a compiler, and tests then cover PyTorch alone.
BUILDABLE = {
    level.name: level
    for level in dict.fromkeys((*levels_here(), *runnable_levels()))
    if shutil.which("c++") or find_built(level, (SHIPPED, CACHE))
}


@functools.cache
def library_of(name: str) -> KernelLibrary:
    level = BUILDABLE[name]
    return KernelLibrary(find_built(level, (SHIPPED, CACHE)) or build(level, CACHE), level)


# Attention backends for a CPU; without a compiler there is no native attention.
BACKENDS: dict[str, AttentionBackend] = dict(ATTENTION_BACKENDS)
for _level in list(BUILDABLE)[:1]:
    BACKENDS["native"] = NativeAttention(library_of(_level))
