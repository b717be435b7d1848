"""Child processes that hold the engines and servers of the comparison, with one interface for all. Torch-free."""

import itertools
import json
import os
import random
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadtest.client.sse_client import Target
from loadtest.client.workload import CompletionRequest
from loadtest.measurement.benchmark_program import MeasurementFailed
from loadtest.peers.comparison_cells import DEFAULTS, Cell
from loadtest.peers.installation import ROOT, PeerUnavailable
from loadtest.scenarios.closed_and_open_loop import complete_all

START_SECONDS = 120.0
REQUEST_SECONDS = 900.0  # llama-server without flags runs four requests at a time: of 64, some wait for minutes
STOP_SECONDS = 20.0
REQUESTS_PER_STREAM = 2
MIN_REQUESTS = 3
MAX_SLOW_REQUESTS = 64  # for a server without flags


def random_prompts(cell: Cell, vocab_size: int, seed: int) -> list[list[int]]:
    """Return a measurement's prompts: random token ids without the vocabulary's last one, which may end a text.

    No two prompts are alike, so that no prefix cache helps.
    """
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size - 1) for _ in range(cell.prompt_tokens)] for _ in range(num_prompts(cell))]


def num_prompts(cell: Cell) -> int:
    """Return the number of prompts that a measurement of this cell uses."""
    if cell.kind != "http":
        return cell.streams
    wanted = max(MIN_REQUESTS, REQUESTS_PER_STREAM * cell.streams)
    return min(wanted, MAX_SLOW_REQUESTS) if cell.precision == DEFAULTS else wanted


class _Child:
    """Child process with standard error in a file, so that errors can quote its last line."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **pipes: Any) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by close)
        try:
            self.child = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **environment}, stderr=self._log, text=True, **pipes
            )
        except OSError as error:
            self._log.close()
            raise PeerUnavailable(f"{command[0]}: {error.strerror}") from error

    def unavailable(self, fault: str) -> PeerUnavailable:
        """Return an error with the last line that the process wrote."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return PeerUnavailable(f"{fault}: {lines[-1] if lines else 'no output'}")

    def close(self) -> None:
        """Stop the process."""
        self.child.terminate()
        try:
            self.child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()


class Driver(_Child):
    """An engine in a child process that speaks `loadtest.peers.drivers.protocol`.

    Raises:
        PeerUnavailable: the engine does not start.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self._read()
        except PeerUnavailable:
            self.close()
            raise

    def measure(self, cell: Cell, prompts: list[list[int]]) -> dict[str, Any]:
        """Run one wave of prompts. Return tokens/s for the cell's kind, and the first sequence's token ids.

        Raises:
            PeerUnavailable: the engine failed or died.
        """
        try:
            line = json.dumps({"prompts": prompts, "output_tokens": cell.output_tokens})
            print(line, file=self.child.stdin, flush=True)
        except BrokenPipeError as error:
            raise self.unavailable("the engine died") from error
        wave = self._read()
        if "error" in wave:
            raise PeerUnavailable(wave["error"])
        first, total = wave["first_seconds"], wave["total_seconds"]
        num_prompt_tokens = sum(map(len, prompts))
        rate = num_prompt_tokens / first if cell.kind == "prompt" else wave.pop("later_tokens") / (total - first)
        wave.pop("later_tokens", None)
        return {"tokens_per_second": rate, **wave}

    def _read(self) -> dict[str, Any]:
        for line in self.child.stdout or ():
            if line.startswith("{"):  # skip what libraries print while they load
                response: dict[str, Any] = json.loads(line)
                return response
        raise self.unavailable("the engine ended")


class Server(_Child):
    """A server with OpenAI's completions API, in a child process.

    Args:
        command: the command line, with the port.
        ready_path: path that returns 200 once the server is ready.

    Raises:
        PeerUnavailable: the server does not start.
    """

    def __init__(self, command: Sequence[str], port: int, ready_path: str) -> None:
        super().__init__(command, {}, stdout=subprocess.DEVNULL)
        self._target = Target("127.0.0.1", port)
        self._indexes = itertools.count()
        try:
            self._wait_ready(self._target.url + ready_path)
        except PeerUnavailable:
            self.close()
            raise

    def measure(self, cell: Cell, prompts: list[list[int]]) -> dict[str, Any]:
        """Send all prompts from `cell.streams` clients. Each sends its next request when its last has ended.

        Raises:
            PeerUnavailable: a request failed.
        """
        numbered = zip(self._indexes, prompts, strict=False)
        requests = [
            CompletionRequest(index=index, prompt=prompt, max_tokens=cell.output_tokens, temperature=0.0)
            for index, prompt in numbered
        ]
        try:
            run = complete_all(self._target, requests, num_streams=cell.streams, timeout_seconds=REQUEST_SECONDS)
        except MeasurementFailed as error:
            raise PeerUnavailable(str(error)) from error
        ttft = [outcome.ttft_seconds for outcome in run.outcomes if outcome.ttft_seconds is not None]
        p50, p99 = 1e3 * np.percentile(ttft, (50, 99))
        return {
            "tokens_per_second": run.tokens_per_second,
            "ttft_p50_ms": float(p50),
            "ttft_p99_ms": float(p99),
            "client_cpu_share": run.client_cpu_share,
        }

    def _wait_ready(self, url: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.child.poll() is not None:
                raise self.unavailable("the server ended")
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except OSError:  # includes HTTP errors, such as 503 while the model loads
                time.sleep(0.05)
        raise self.unavailable(f"the server was not ready within {START_SECONDS:g} s")
