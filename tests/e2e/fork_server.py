"""Fork server of `serving`: a process with all imports of the service, which forks each `kvasir serve` of the tests.

A service that starts from nothing spends 3.4 s of CPU time on imports: 2.3 s in its worker (torch), 1.1 s in main. Its
workers are forked too, instead of started as new interpreters. Tests of starts, deaths and memory use no fork server.

Run as `python -m tests.e2e.fork_server DESCRIPTOR`, the descriptor of a Unix socket. A message is the JSON of argv, env
and the working directory, with the descriptors of stdout, stderr and a pipe. The pipe gets the id of the service's main
process, and at its end the exit code.
"""

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from typing import Any, BinaryIO

from service.config.torch_environment import set_torch_environment
from service.supervisor.worker_process import WorkerProcess
from service.worker import worker

_MAX_MESSAGE_BYTES = 2**17
# Modules that main imports, with all modules that they import.
_MODULES = ("service.cli.main", "service.cli.serve", "service.supervisor.api_process")


class ForkServer:
    """Client of a fork server, which ends with this process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.e2e.fork_server", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        atexit.register(self.close)

    def close(self) -> None:
        """End the fork server. The services that it has forked go on."""
        self._socket.close()
        self._process.wait()

    def start(self, argv: list[str], env: dict[str, str], stdout: BinaryIO, stderr: BinaryIO) -> "ForkedService":
        """Start a program with this argv, whose first item is the name of its module."""
        message = json.dumps({"argv": argv, "env": env, "directory": os.getcwd()}).encode()
        reading, writing = os.pipe()
        socket.send_fds(self._socket, [message], [stdout.fileno(), stderr.fileno(), writing])
        os.close(writing)
        return ForkedService(os.fdopen(reading, "rb", buffering=0))


class ForkedService:
    """Main process of a service that a fork server has forked, with the methods of `Popen` that tests use."""

    def __init__(self, pipe: io.FileIO) -> None:
        self._pipe = pipe
        self.pid = int(pipe.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end of the process, at most `timeout` seconds, and return its exit code."""
        if self.returncode is None:
            if not select.select([self._pipe], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("kvasir", timeout)
            with self._pipe:
                self.returncode = int(self._pipe.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def serve(control: socket.socket) -> None:
    """Fork a keeper for each message. Return in the program to run; the fork server itself ends with the socket."""
    while True:
        message, received, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 3)
        if not message:
            sys.exit()
        if os.fork() == 0 and not keep(received[-1]):
            control.close()
            return become(json.loads(message), *received)
        for descriptor in received:
            os.close(descriptor)


def keep(pipe: int) -> bool:
    """Fork the main process of a service, and write its id and exit code to the pipe. Return False in that process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (pid := os.fork()) == 0:
        return False
    os.write(pipe, f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    os.write(pipe, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def become(message: dict[str, Any], stdout: int, stderr: int, pipe: int) -> None:
    """Give this process the streams, environment, directory and argv of a new program. Its workers are forked."""
    for descriptor, standard in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, standard)
    for descriptor in (stdout, stderr, pipe):
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(message["env"])
    os.chdir(message["directory"])
    sys.argv = message["argv"]
    WorkerProcess.start = classmethod(fork_worker)  # type: ignore[method-assign, assignment]


def fork_worker(cls: type[WorkerProcess], *, is_standby: bool = False) -> WorkerProcess:
    """Fork a worker process, in place of `WorkerProcess.start`. It keeps only the descriptors that a new one has."""
    ours, theirs = socket.socketpair()
    main = os.getpid()
    if pid := os.fork():
        theirs.close()
        return cls(ours, pid)
    os.setpgid(0, 0)
    descriptor = theirs.detach()
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    worker.main(descriptor, main, is_standby)


if __name__ == "__main__":
    set_torch_environment()
    worker.import_engine()
    for module in _MODULES:
        importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps the keepers
    serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
