"""A kernel that gets no scratch memory ends its process with a message, instead of writing to address 0."""

import signal
import subprocess
import sys

import pytest

from tests.model.kernel_libraries import BUILDABLE

# Attention with heads so large that its scratch memory comes from the system, not from memory already allocated.
PROGRAM = """
import ctypes, resource, sys
from pathlib import Path
import torch
from model.attention.native import NativeAttention
from tests.model.kernel_libraries import library_of
from tests.model.attention.test_native_attention import Scene

torch.set_num_threads(1)
library = library_of(sys.argv[1])
small, large = Scene((4, 1, 64, 16), [(1, 1)]), Scene((64, 1, 256, 16), [(96, 96)])
small.attend(NativeAttention(library))  # makes the library's thread-local variables
attend = library.function

class Limited(type(library)):
    def __init__(self):
        self.level = sys.argv[1]
    def function(self, name, *types, result=None):
        found = attend(name, *types, result=result)
        if not name.startswith("kvasir_attention"):
            return found
        def call(*arguments):
            ctypes.CDLL(None).malloc_trim(0)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used, used))
            found(*arguments)
        return call

large.attend(NativeAttention(Limited()))
"""


@pytest.mark.parametrize("level", list(BUILDABLE)[:1])
def test_a_kernel_without_scratch_memory_ends_the_process_with_a_message(level: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, level], capture_output=True, text=True, timeout=200)
    assert done.stderr.startswith("kvasir: out of memory: a kernel needs "), done.stderr[-2000:]
    assert done.returncode == -signal.SIGABRT
