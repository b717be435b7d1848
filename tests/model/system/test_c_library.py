"""Calls to the C library: a child process ends with its parent, and freed memory returns to the system."""

import subprocess
import sys

import psutil


def test_a_child_process_ends_when_its_parent_is_killed() -> None:
    child = """
import signal
from model.system.c_library import end_with_parent
end_with_parent()
print(flush=True)
signal.pause()
"""
    parent = f"""
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        process = psutil.Process(int(starter.stdout.readline()))
        starter.kill()
    assert psutil.wait_procs([process], timeout=60)[1] == []


_PROGRAM = """
import ctypes, psutil
from model.system.c_library import trim_heap
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
