"""A process that ends with the process that started it."""

import subprocess
import sys

import psutil


def test_a_child_process_ends_when_its_parent_is_killed() -> None:
    child = """
import signal
from model.system.parent_death import end_with_parent
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
