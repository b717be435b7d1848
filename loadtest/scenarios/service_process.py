"""A server as a child process on a free port, and its processes' figures from the operating system."""

import io
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

import psutil

from loadtest.client.outcome import Ending
from loadtest.client.sse_client import Target, api_key_given, complete_blocking
from loadtest.client.workload import LoadRequest
from loadtest.measurement.benchmark_program import MeasurementFailed

START_SECONDS = 120.0
# Longer than the service's drain and close, so that it is killed only if it hangs.
STOP_SECONDS = 60.0
_POLL_SECONDS = 0.02
_FIRST_REQUEST = LoadRequest(index=0, prompt="Once upon a time", max_tokens=1, temperature=0.0)


class ServiceFailed(MeasurementFailed):
    """The server did not start, or died. The message ends with the last lines of its log."""


def kvasir_serve(checkpoint: Path, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command of the service, without a port."""
    kvasir = Path(sys.executable).with_name("kvasir")
    return [str(kvasir), "serve", "--checkpoint", str(checkpoint), *arguments]


class ServiceProcess:
    """Context manager that runs a server with OpenAI's completions API for the length of its block.

    Args:
        command: the command; `--port` with a free port is added.
    """

    def __init__(self, command: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.target = Target("127.0.0.1", port, api_key_given())  # Kvasir reads the same variable
        self.command = [*command, "--port", str(port)]
        self._started_seconds = 0.0
        self._process: psutil.Popen | None = None
        self._log: IO[str] = io.StringIO()

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        self._started_seconds = time.perf_counter()
        try:
            self._process = psutil.Popen(self.command, stdout=self._log, stderr=subprocess.STDOUT)
        except OSError as error:
            raise ServiceFailed(f"{self.command[0]}: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server with SIGTERM, as an operator would. Processes that remain are killed."""
        processes = self.all_processes()
        if self.process.is_running():
            self.process.terminate()
        psutil.wait_procs([self.process], timeout=STOP_SECONDS)
        left = [process for process in processes if process.is_running()]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=5)
        self._log.close()

    @property
    def process(self) -> psutil.Popen:
        """The server's main process. Raises ServiceFailed if it was not started."""
        if self._process is None:
            raise ServiceFailed("the service was not started")
        return self._process

    def wait_first_token(self) -> float:
        """Return the seconds from process start to the first token of the first stream that is served.

        The request is repeated until it succeeds. Raises `ServiceFailed` if no request succeeds in time.
        """
        while True:
            outcome = complete_blocking(self.target, _FIRST_REQUEST, model=None, timeout_seconds=START_SECONDS)
            if outcome.ending is Ending.OK and outcome.chunk_seconds:
                return outcome.chunk_seconds[0] - self._started_seconds
            fault = f"first request: {outcome.ending.value}: {outcome.detail}"
            if self.process.poll() is not None:
                fault = f"the service exited with code {self.process.returncode}"
            elif outcome.ending in (Ending.CONNECTION, Ending.HTTP_ERROR):
                if time.perf_counter() - self._started_seconds < START_SECONDS:
                    time.sleep(_POLL_SECONDS)
                    continue
                fault = f"the service served nothing within {START_SECONDS:g} s ({outcome.detail})"
            self._log.seek(0)
            raise ServiceFailed("\n".join([fault, *self._log.read().splitlines()[-20:]]))

    def all_processes(self) -> list[psutil.Process]:
        """Return the server's main process and all its descendants."""
        if not self.process.is_running():
            return []
        return [self.process, *self.process.children(recursive=True)]

    def api_processes(self) -> list[psutil.Process]:
        """Return the processes that hold an accepted connection to the port."""
        with socket.create_connection((self.target.host, self.target.port)) as held:
            held.sendall(self.target.request_bytes("GET", "/health"))
            held.recv(1)  # the response shows that an API process has accepted the connection
            return [
                process
                for process in self.all_processes()
                if any(
                    connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == self.target.port
                    for connection in process.net_connections(kind="tcp")
                )
            ]

    def worker_processes(self) -> list[psutil.Process]:
        """Return the processes that have torch mapped, except the standby: they run the engine."""
        return [p for p in self.all_processes() if p.name() != "kvasir-standby" and has_torch(p)]


def has_torch(process: psutil.Process) -> bool:
    """Return True if a torch library is mapped into the process."""
    maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
    return any("/torch/" in line or "libtorch" in line for line in maps.splitlines())


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the user and system CPU time that the processes have used so far."""
    times = [process.cpu_times() for process in processes]
    return float(sum(used.user + used.system for used in times))
