"""Server as a child process on a free port, and its processes."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

from loadtest.client.outcome import Ending
from loadtest.client.sse_client import CompletionClient, Target, api_key_given
from loadtest.client.workload import LoadRequest
from loadtest.measurement.benchmark_program import MeasurementFailed

_START_SECONDS = 120.0
# Longer than the service's drain and close, so that it is killed only if it hangs.
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.02
_FIRST_REQUEST = LoadRequest(index=0, prompt="Once upon a time", max_tokens=1, temperature=0.0)


class ServiceFailed(MeasurementFailed):
    """Failure of a server to start or to serve. The message ends with the last lines of its log."""


def kvasir_serve(checkpoint: Path, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command line of `kvasir serve`, without a port."""
    kvasir = Path(sys.executable).with_name("kvasir")
    return [str(kvasir), "serve", "--checkpoint", str(checkpoint), *arguments]


class ServiceProcess:
    """Server with OpenAI's completions API as a child process, until the end of the `with` block.

    command: command line of the server; `--port` with a free port is added.

    Raises:
        ServiceFailed: the command cannot be run.
    """

    def __init__(self, command: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.target = Target("127.0.0.1", port, api_key_given())  # Kvasir reads the same variable
        self.command = [*command, "--port", str(port)]
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by __exit__)
        self._started_seconds = time.perf_counter()
        try:
            self._main = psutil.Popen(self.command, stdout=self._log, stderr=subprocess.STDOUT)
        except OSError as error:
            self._log.close()
            raise ServiceFailed(f"{self.command[0]}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server with SIGTERM, as an operator would. Processes that remain are killed."""
        processes = self.processes()
        if self._main.is_running():
            self._main.terminate()
        psutil.wait_procs([self._main], timeout=_STOP_SECONDS)
        left = [process for process in processes if process.is_running()]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=5)
        self._log.close()

    def wait_first_token(self) -> float:
        """Return the seconds from the start of the server to the first token of the first stream that it serves.

        The request is repeated until it succeeds. Raises `ServiceFailed` if no request succeeds in time.
        """
        client = CompletionClient(self.target, timeout_seconds=_START_SECONDS)
        while True:
            outcome = client.complete(_FIRST_REQUEST)
            if outcome.ending is Ending.OK and outcome.chunk_seconds:
                client.close()
                return outcome.chunk_seconds[0] - self._started_seconds
            fault = f"first request: {outcome.ending.value}: {outcome.detail}"
            if self._main.poll() is not None:
                fault = f"the service exited with code {self._main.returncode}"
            elif outcome.ending in (Ending.CONNECTION, Ending.HTTP_ERROR):
                if time.perf_counter() - self._started_seconds < _START_SECONDS:
                    time.sleep(_POLL_SECONDS)
                    continue
                fault = f"the service served nothing within {_START_SECONDS:g} s ({outcome.detail})"
            self._log.seek(0)
            raise ServiceFailed("\n".join([fault, *self._log.read().splitlines()[-20:]]))

    def processes(self, part: str | None = None) -> list[psutil.Process]:
        """Return the processes of the server: all, or those of one part: "main", "api", "worker" or "standby"."""
        if not self._main.is_running():
            return []
        processes = [self._main, *self._main.children(recursive=True)]
        return [process for process in processes if part is None or process.name() == f"kvasir-{part}"]


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the user and system CPU time that the processes have used so far."""
    times = [process.cpu_times() for process in processes]
    return float(sum(used.user + used.system for used in times))
