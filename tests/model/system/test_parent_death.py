"""Commands that end with the process that started them."""

import os
import signal
import subprocess
import sys

import psutil

from model.system.parent_death import bind_command_to_parent

ECHO = (sys.executable, "-I", "-S", "-c", "import os; print(os.getpid())")


def test_a_bound_command_takes_the_place_of_the_interpreter_that_binds_it() -> None:
    with subprocess.Popen(bind_command_to_parent(ECHO, signal.SIGKILL), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.read()) == process.pid
    assert process.returncode == 0


def test_a_command_whose_parent_has_ended_already_does_not_run() -> None:
    *interpreter, _, number = bind_command_to_parent((), signal.SIGTERM)
    # A pid that is not our parent's, as if the parent had ended before PR_SET_PDEATHSIG was set.
    command = [*interpreter, str(os.getppid()), number, *ECHO]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_a_bound_command_gets_its_signal_when_its_parent_is_killed() -> None:
    waits = [sys.executable, "-I", "-S", "-c", "import signal; print(flush=True); signal.pause()"]
    parent = f"""
import signal, subprocess
from model.system.parent_death import bind_command_to_parent
child = subprocess.Popen(bind_command_to_parent({waits}, signal.SIGTERM), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        child = psutil.Process(int(starter.stdout.readline()))
        starter.kill()
    assert psutil.wait_procs([child], timeout=60)[1] == []
