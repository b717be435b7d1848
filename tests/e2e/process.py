"""`kvasir serve` as a child process on a free port, with its HTTP client and its operating system processes."""

import contextlib
import functools
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import psutil

from tests.e2e.fork_server import ForkedService, ForkServer

# Time after which a wait counts as a hang. Only a failing test waits this long. A limit this high does not fail a
# test on a slow or busy machine.
PATIENCE_SECONDS = 600.0
START_SECONDS = 900.0  # torch takes 2 s to import, and a minute if all processors are busy
# httpx makes a TLS context for each request, also to http://. With the system's certificates that takes 23 ms of CPU
# time, more than the request itself.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
# Pytest workers take ports of different remainders, so that two servers that start at once never get the same port.
_NUM_SHARES = 16


@dataclass
class Service:
    """Running service. `log` is the file of its stderr, `printed` the file of its stdout."""

    process: subprocess.Popen[bytes] | ForkedService
    url: str
    log: Path
    printed: Path

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=fields, timeout=PATIENCE_SECONDS, verify=NO_TLS)

    @contextlib.contextmanager
    def asking(
        self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **fields: Any
    ) -> Iterator[None]:
        """Send a request, run the block without reading the response, and then disconnect."""
        body, port = json.dumps(fields).encode(), int(self.url.rpartition(":")[2])
        told = {"host": "a", "content-length": str(len(body)), **(headers or {})}
        head = "\r\n".join([f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items()), "", ""])
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
            connection.sendall(head.encode() + body)
            yield

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_SECONDS, verify=NO_TLS)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        response = self.post(prompt=prompt, **fields)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def text(self, prompt: Any, **fields: Any) -> str:
        return str(self.complete(prompt, **fields)["choices"][0]["text"])

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric, summed over the series with these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(want in line for want in wanted))

    def is_ready(self) -> bool:
        try:
            return self.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    @property
    def children(self) -> list[psutil.Process]:
        return alive(psutil.Process(self.process.pid).children(recursive=True))

    @property
    def worker(self) -> psutil.Process:
        """Return the worker process, which runs the engine. It is not the standby worker."""
        return self._named("kvasir-worker")

    @property
    def standby(self) -> psutil.Process:
        """Return the standby worker process, which replaces the worker when the worker dies."""
        return self._named("kvasir-standby")

    def _named(self, name: str) -> psutil.Process:
        (process,) = (child for child in self.children if child.name() == name)
        return process

    @property
    def api(self) -> psutil.Process:
        """Return the API process, which serves HTTP."""
        return self._named("kvasir-api")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to main, wait for its end, and return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)


def free_port() -> int:
    """Return a port that is not in use and that no other pytest worker gets at the same time."""
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _NUM_SHARES
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port // 2 % _NUM_SHARES == share:  # Linux assigns only every second port
            return port


def wait_until(condition: Callable[[], bool], *, seconds: float = PATIENCE_SECONDS, what: str) -> None:
    """Poll until the condition is true. Fail if it is not true within the given seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def command(checkpoint: Path, port: int, *flags: str, program: str = "service.cli") -> list[str]:
    """Return the command line of a service that rejects or ends no request because of its time in the queue.

    The service has a standby worker only with --standby, because starting it takes longer than most tests.
    """
    if "--standby" not in flags:
        flags = ("--no-standby", *flags)
    if "--max-queue-seconds" not in flags:
        flags = ("--max-queue-seconds", "0", *flags)
    return [
        *(sys.executable, "-m", program, "serve", "--checkpoint", str(checkpoint)),
        *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--threads", "1"),
        *("--target-queue-seconds", "0", *flags),
    ]


def serving(
    checkpoint: Path, directory: Path, *flags: str, program: str = "service.cli", **variables: str
) -> contextlib.AbstractContextManager[Service]:
    """Fork a service and wait until it is ready. Check that all of its processes have ended after the block."""
    return _serving(checkpoint, directory, flags, program, variables, _fork_server().start)


def serving_anew(
    checkpoint: Path, directory: Path, *flags: str, program: str = "service.cli", **variables: str
) -> contextlib.AbstractContextManager[Service]:
    """Serve as `serving`, with main and workers that start as new interpreters: for tests of starts, deaths, memory."""
    return _serving(checkpoint, directory, flags, program, variables, _start)


@functools.cache
def _fork_server() -> ForkServer:
    """Return the fork server of this pytest process."""
    return ForkServer()


def _start(argv: list[str], env: dict[str, str], stdout: BinaryIO, stderr: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", *argv], stdout=stdout, stderr=stderr, env=env)


@contextlib.contextmanager
def _serving(
    checkpoint: Path,
    directory: Path,
    flags: tuple[str, ...],
    program: str,
    variables: dict[str, str],
    start: Callable[[list[str], dict[str, str], BinaryIO, BinaryIO], subprocess.Popen[bytes] | ForkedService],
) -> Iterator[Service]:
    port = free_port()
    log, printed = directory / f"{port}.err", directory / f"{port}.out"
    _, _, *argv = command(checkpoint, port, *flags, program=program)
    with log.open("wb") as stderr, printed.open("wb") as stdout:
        process = start(argv, clean_environment() | variables, stdout, stderr)
    service = Service(process, f"http://127.0.0.1:{port}", log, printed)
    family = [psutil.Process(process.pid)]
    try:
        wait_until(lambda: process.poll() is not None or service.is_ready(), seconds=START_SECONDS, what="the service")
        assert process.poll() is None, log.read_text()
        family += service.children
        yield service
        if process.poll() is None:
            family += service.children
            assert service.stop() == 0, log.read_text()
        wait_until(lambda: not alive(family), what=f"the end of {alive(family)}")
    finally:
        if process.poll() is None:
            family += service.children
        for member in alive(family):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(PATIENCE_SECONDS)


def alive(family: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run. `is_running` is false if the pid has been reused."""
    return [process for process in family if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it ended between the two calls
        return False


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVASIR_")}
