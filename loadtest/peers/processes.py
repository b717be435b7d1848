"""Child processes that hold the engines and servers of the comparison. Torch-free."""

import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadtest.client.workload import LoadRequest
from loadtest.measurement.benchmark_program import MeasurementFailed
from loadtest.peers.comparison_cells import Cell
from loadtest.peers.engines import ROOT
from loadtest.scenarios.service_benchmark import ServiceProcess, complete_all

REQUEST_SECONDS = 900.0  # llama-server without flags runs four requests at a time: of 64, some wait for minutes
STOP_SECONDS = 20.0


class DriverProcess:
    """An engine in a child process that speaks `loadtest.peers.drivers.protocol`.

    Standard error goes to a file, so that errors can quote its last line.

    Raises:
        MeasurementFailed: the engine does not start.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by close)
        pipe, environment = subprocess.PIPE, {**os.environ, **variables}
        try:
            self.child = subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=self._log
            )
        except OSError as error:
            self._log.close()
            raise MeasurementFailed(f"{command[0]}: {error.strerror}") from error
        try:
            self._read()
        except MeasurementFailed:
            self.close()
            raise

    def measure(self, cell: Cell, prompts: list[list[int]]) -> dict[str, Any]:
        """Run one wave of prompts. Return tokens/s for the cell's kind, and the first sequence's token ids.

        Raises:
            MeasurementFailed: the engine failed or died.
        """
        try:
            line = json.dumps({"prompts": prompts, "output_tokens": cell.output_tokens})
            print(line, file=self.child.stdin, flush=True)
        except BrokenPipeError:
            pass  # the read below reports the engine's last line
        wave = self._read()
        if "error" in wave:
            raise MeasurementFailed(wave["error"])
        first, later_tokens = wave["first_seconds"], wave.pop("later_tokens")
        if cell.kind == "prompt":
            return {"tokens_per_second": sum(map(len, prompts)) / first, **wave}
        return {"tokens_per_second": later_tokens / (wave["total_seconds"] - first), **wave}

    def close(self) -> None:
        """Stop the process."""
        self.child.terminate()
        try:
            self.child.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.communicate()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        for line in self.child.stdout or ():
            if line.startswith("{"):  # skip what libraries print while they load
                response: dict[str, Any] = json.loads(line)
                return response
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        raise MeasurementFailed(f"the engine ended: {lines[-1] if lines else 'no output'}")


class PeerServer:
    """A server with OpenAI's completions API. Raises MeasurementFailed if the server does not start."""

    def __init__(self, command: Sequence[str]) -> None:
        self._service = ServiceProcess(command).__enter__()
        self._indexes = itertools.count()
        try:
            self._service.wait_first_token()
        except MeasurementFailed:
            self.close()
            raise

    def measure(self, cell: Cell, prompts: list[list[int]]) -> dict[str, Any]:
        """Send all prompts from `cell.streams` clients in a closed loop.

        Raises:
            MeasurementFailed: a request failed.
        """
        requests = [
            LoadRequest(index=index, prompt=prompt, max_tokens=cell.output_tokens, temperature=0.0)
            for index, prompt in zip(self._indexes, prompts, strict=False)
        ]
        target = self._service.target
        run = complete_all(target, requests, num_streams=cell.streams, timeout_seconds=REQUEST_SECONDS)
        ttfts = [outcome.ttft_seconds for outcome in run.outcomes if outcome.ttft_seconds is not None]
        p50, p99 = (1e3 * float(np.percentile(ttfts, share)) for share in (50, 99))
        return {
            "tokens_per_second": run.tokens_per_second,
            "ttft_p50_ms": p50,
            "ttft_p99_ms": p99,
            "client_cpu_share": run.client_cpu_share,
        }

    def close(self) -> None:
        """Stop the server."""
        self._service.__exit__()
