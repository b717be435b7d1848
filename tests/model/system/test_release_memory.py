"""Memory freed during startup is returned to the system, although a serving process retains freed memory."""

import subprocess
import sys

_PROGRAM = """
import ctypes, psutil
from model.system.release_memory import trim_heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
libc.mallopt(-4, 0), libc.mallopt(-1, 2**31 - 1)  # as service.worker.engine_factory.keep_freed_memory
blocks = [libc.malloc(2**20) for _ in range(100)]
for block in blocks:
    libc.memset(block, 1, 2**20)
kept = libc.malloc(2**20)
for block in blocks:
    libc.free(block)
before = psutil.Process().memory_info().rss
trim_heap()
print((before - psutil.Process().memory_info().rss) >> 20)
"""


def test_trim_heap_returns_freed_memory_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 90
