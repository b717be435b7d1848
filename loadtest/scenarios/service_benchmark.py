"""Common parts of the benchmarks that start a service: server process and closed loop."""

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import gevent
import psutil

from loadtest.client.outcome import Ending, LoadRun, Outcome
from loadtest.client.requests import LoadRequest
from loadtest.client.sse_client import CompletionClient, Target
from loadtest.measurement.benchmark_program import MeasurementFailed
from service.config.settings import ServeSettings, read_settings

_START_SECONDS = 120.0
_STOP_SECONDS = 60.0  # longer than the service's drain and close, so that it is killed only if it hangs
_POLL_SECONDS = 0.02
_FIRST_REQUEST = LoadRequest(index=0, prompt="Once upon a time", max_tokens=1, temperature=0.0)


def kvasir_serve(checkpoint: Path, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command of `kvasir serve` for this checkpoint, without `--port`."""
    kvasir = Path(sys.executable).with_name("kvasir")
    return [str(kvasir), "serve", "--checkpoint", str(checkpoint), *arguments]


class ServiceProcess:
    """Server with OpenAI's API as a child process, until the end of the `with` block. Port 0: a free one."""

    def __init__(self, command: Sequence[str], port: int = 0) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            port = probe.getsockname()[1]
        self.target = Target.parse(f"http://127.0.0.1:{port}")
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by __exit__)
        self._started_seconds = time.perf_counter()
        try:
            self._main = psutil.Popen([*command, "--port", str(port)], stdout=self._log, stderr=subprocess.STDOUT)
        except OSError as error:
            self._log.close()
            raise MeasurementFailed(f"cannot run {command[0]}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server with SIGTERM, as an operator would. Processes that remain are killed."""
        processes = self.processes()
        if processes:
            self._main.terminate()
        psutil.wait_procs([self._main], timeout=_STOP_SECONDS)
        left = psutil.wait_procs(processes, timeout=0)[1]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=5)
        self._log.close()

    def wait_first_token(self, model: str | None = None) -> float:
        """Return the seconds from the server's start to its first token. Raises `MeasurementFailed` if none comes."""
        client = CompletionClient(self.target, timeout_seconds=_START_SECONDS)
        while True:
            outcome = client.complete(_FIRST_REQUEST, model=model)
            if outcome.ending is Ending.OK and outcome.chunk_seconds:
                client.close()
                return outcome.chunk_seconds[0] - self._started_seconds
            code, seconds = self._main.poll(), time.perf_counter() - self._started_seconds
            is_starting = code is None and outcome.ending in (Ending.CONNECTION, Ending.HTTP_ERROR)
            if is_starting and seconds < _START_SECONDS:
                gevent.sleep(_POLL_SECONDS)
                continue
            fault = f"first request after {seconds:.0f} s: {outcome.ending.value}: {outcome.detail}"
            if code is not None:
                fault = f"the service exited with code {code}"
            self._log.seek(0)
            raise MeasurementFailed("\n".join([fault, *self._log.read().splitlines()[-20:]]))

    def processes(self, part: str | None = None) -> list[psutil.Process]:
        """Return the server's processes: all, or those that are kvasir-main, -api, -worker or -standby by `part`."""
        if not self._main.is_running():
            return []
        processes = [self._main, *self._main.children(recursive=True)]
        return [process for process in processes if part is None or process.name() == f"kvasir-{part}"]


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the seconds of user and system CPU time that these processes together have used so far."""
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def run_closed(client: CompletionClient, requests: Iterable[LoadRequest], *, num_streams: int) -> LoadRun:
    """Send requests from `num_streams` clients, each one after the other, and return the load.

    Each client waits for the end of its previous request, and then for the Retry-After if it was rejected.
    """
    queue, outcomes, began = iter(requests), list[Outcome](), (time.perf_counter(), time.process_time())

    def stream() -> None:
        for request in queue:
            outcome = client.complete(request)
            outcomes.append(outcome)
            gevent.sleep(outcome.retry_after_seconds)

    gevent.joinall([gevent.spawn(stream) for _ in range(num_streams)], raise_error=True)
    return LoadRun.ended_now(outcomes, *began)


def complete_all(
    target: Target, requests: Iterable[LoadRequest], *, num_streams: int, timeout_seconds: float = 120.0
) -> LoadRun:
    """Send requests as `run_closed`, and return the load. Raises `MeasurementFailed` if a request does not succeed."""
    client = CompletionClient(target, timeout_seconds=timeout_seconds)
    run = run_closed(client, requests, num_streams=num_streams)
    client.close()
    check_success(run.outcomes)
    return run


def check_success(outcomes: Iterable[Outcome]) -> None:
    """Raise `MeasurementFailed` with the reason if a request did not succeed."""
    for outcome in outcomes:
        if outcome.ending is not Ending.OK:
            raise MeasurementFailed(f"request {outcome.index} failed with {outcome.ending.value}: {outcome.detail}")


def serve_settings(arguments: argparse.Namespace) -> ServeSettings:
    """Return the settings of the service that a benchmark with these arguments starts."""
    flags = ["--checkpoint", str(arguments.checkpoint), *arguments.serve]
    return read_settings(ServeSettings, flags, command="serve", summary="")
