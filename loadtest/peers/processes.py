"""Child processes that hold the engines and servers of the comparison, with one interface for all. Torch-free."""

import asyncio
import http.client
import itertools
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadtest.client.outcome import Ending
from loadtest.client.sse_client import AsyncClient, Target
from loadtest.client.workload import CompletionRequest
from loadtest.peers.comparison_cells import DEFAULTS, Cell
from loadtest.peers.installation import ROOT, PeerUnavailable
from loadtest.scenarios import closed_and_open_loop as bench_http

START_SECONDS = 120.0
REQUEST_SECONDS = 900.0  # llama-server without flags runs four requests at a time: of 64, some wait for minutes
STOP_SECONDS = 20.0
REQUESTS_PER_STREAM = 2
MIN_REQUESTS = 3
MAX_SLOW_REQUESTS = 64  # for a server without flags


class Prompts:
    """Random token ids, reproducible by seed. No two prompts are alike, so that no prefix cache helps."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def take(self, count: int, num_tokens: int) -> list[list[int]]:
        """Return `count` prompts of `num_tokens` tokens. They never contain the last id, which is the end of text."""
        return [[self._random.randrange(self._vocab_size - 1) for _ in range(num_tokens)] for _ in range(count)]


class _Process:
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

    def unavailable(self, what: str) -> PeerUnavailable:
        """Return an error with the last line that the process wrote."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return PeerUnavailable(f"{what}: {lines[-1] if lines else 'no output'}")

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


class Driver:
    """An engine in a child process that speaks `loadtest.peers.drivers.protocol`.

    Raises:
        PeerUnavailable: the engine does not start.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = _Process(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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
        pipe = self._process.child.stdin
        assert pipe is not None
        try:
            print(json.dumps({"prompts": prompts, "output_tokens": cell.output_tokens}), file=pipe, flush=True)
        except BrokenPipeError as error:
            raise self._process.unavailable("the engine died") from error
        wave = self._read()
        if "error" in wave:
            raise PeerUnavailable(wave["error"])
        first, total = wave["first_seconds"], wave["total_seconds"]
        num_prompt_tokens = sum(map(len, prompts))
        rate = num_prompt_tokens / first if cell.kind == "prompt" else wave["later_tokens"] / (total - first)
        return {"tokens_per_second": rate, "first_seconds": first, "total_seconds": total} | {
            "token_ids": wave["token_ids"]
        }

    def _read(self) -> dict[str, Any]:
        pipe = self._process.child.stdout
        assert pipe is not None
        for line in pipe:
            if line.startswith("{"):  # skip what libraries print while they load
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise self._process.unavailable("the engine ended")

    def close(self) -> None:
        """Stop the engine."""
        self._process.close()


class TokensRequest(CompletionRequest):
    """Greedy completion of a prompt of token ids."""

    def __init__(self, index: int, token_ids: Sequence[int], max_tokens: int) -> None:
        super().__init__(index=index, prompt=json.dumps(list(token_ids)), max_tokens=max_tokens, temperature=0.0)

    def body(self, model: str | None) -> dict[str, Any]:
        """Return the JSON body, with the prompt as token ids."""
        return super().body(model) | {"prompt": json.loads(self.prompt)}


class Server:
    """A server with OpenAI's completions API, in a child process.

    Args:
        command: the command line, without the port.
        ready_path: path that returns 200 once the server is ready.

    Raises:
        PeerUnavailable: the server does not start.
    """

    def __init__(self, command: Sequence[str], port: int, ready_path: str) -> None:
        self._process = _Process(command, {}, stdout=subprocess.DEVNULL)
        self._target = Target("127.0.0.1", port)
        self._indexes = itertools.count()
        try:
            self._wait_ready(ready_path)
        except PeerUnavailable:
            self.close()
            raise

    def measure(self, cell: Cell, prompts: list[list[int]]) -> dict[str, Any]:
        """Send all prompts from `cell.streams` clients. Each sends its next request when its last has ended.

        Raises:
            PeerUnavailable: a request failed.
        """
        requests = [TokensRequest(next(self._indexes), prompt, cell.output_tokens) for prompt in prompts]
        run = asyncio.run(self._load(requests, cell.streams))
        for outcome in run.outcomes:
            if outcome.ending is not Ending.OK:
                raise PeerUnavailable(f"a request ended with {outcome.ending.value}: {outcome.detail}")
        ttft = [outcome.ttft_seconds for outcome in run.outcomes if outcome.ttft_seconds is not None]
        p50, p99 = 1e3 * np.percentile(ttft, (50, 99))
        return {
            "tokens_per_second": sum(outcome.completion_tokens for outcome in run.outcomes) / run.duration_seconds,
            "ttft_p50_ms": float(p50),
            "ttft_p99_ms": float(p99),
            "client_cpu_share": run.client_cpu_share,
        }

    async def _load(self, requests: Sequence[CompletionRequest], num_streams: int) -> bench_http.Run:
        client = AsyncClient(self._target, timeout_seconds=REQUEST_SECONDS)
        run = await bench_http.run_closed(client, requests, model=None, num_streams=num_streams)
        await client.close()
        return run

    def _wait_ready(self, path: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.child.poll() is not None:
                raise self._process.unavailable("the server ended")
            connection = http.client.HTTPConnection(self._target.host, self._target.port, timeout=5)
            try:
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            time.sleep(0.05)
        raise self._process.unavailable(f"the server was not ready within {START_SECONDS:g} s")

    def close(self) -> None:
        """Stop the server."""
        self._process.close()


def num_prompts(cell: Cell) -> int:
    """Return the number of prompts that a measurement of this cell uses."""
    if cell.kind != "http":
        return cell.streams
    wanted = max(MIN_REQUESTS, REQUESTS_PER_STREAM * cell.streams)
    return min(wanted, MAX_SLOW_REQUESTS) if cell.precision == DEFAULTS else wanted
