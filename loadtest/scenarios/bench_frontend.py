"""Benchmark of the API process's CPU time per token: the whole service with an engine that computes nothing."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from loadtest.client.outcome import LoadRun
from loadtest.client.requests import LoadRequest
from loadtest.measurement.benchmark_program import run_program, show
from loadtest.measurement.figures import spread
from loadtest.scenarios.service_benchmark import ServiceProcess, complete_all, cpu_seconds
from service.config.settings import ServeSettings, read_settings
from service.ipc.messages import Finish, FinishReason, StepStats, Submit, TokenDelta
from service.server import build_server
from service.worker.worker import Worker

# Environment variable, because the worker process inherits nothing else from the benchmark.
_STEP_MS = "KVASIR_BENCH_STEP_MS"
# The kernel counts CPU time in ticks: a shorter load counts as one tick.
_TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")
_STATS = StepStats(**dict.fromkeys(StepStats.__struct_fields__, 0) | {"max_num_running": 1024})


class InstantEngine:
    """Engine for `EngineLoop` that computes nothing: each step returns a token for every sequence."""

    def __init__(self, *, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._next_step_seconds = 0.0
        self._live: dict[str, tuple[Submit, int]] = {}  # sequence and number of its tokens, by uid

    @property
    def has_work(self) -> bool:
        """True if the engine has an unfinished sequence."""
        return bool(self._live)

    def submit(self, submit: Submit) -> None:
        """Add a sequence to the engine. The sequence gets at least one token."""
        self._live[submit.uid] = (submit, len(submit.prior_token_ids))

    def cancel(self, uid: str) -> None:
        """Remove a sequence from the engine."""
        self._live.pop(uid, None)

    def prepare_grammars(self) -> None:
        """Do nothing: no submission has a grammar."""

    def step(self, **_: Any) -> SimpleNamespace:
        """Wait until the next step is due. Return a token for every unfinished sequence, and constant statistics."""
        time.sleep(max(0.0, self._next_step_seconds - time.monotonic()))
        self._next_step_seconds = time.monotonic() + self._step_seconds
        events = [self._next_token(submit, done) for submit, done in list(self._live.values())]
        return SimpleNamespace(events=events, stats=_STATS)

    def _next_token(self, submit: Submit, done: int) -> TokenDelta:
        finish = None
        self._live[submit.uid] = (submit, done + 1)
        if done + 1 >= submit.params.max_tokens:
            del self._live[submit.uid]
            fields: dict[str, Any] = dict.fromkeys(Finish.__struct_fields__, 0)
            fields |= {"reason": FinishReason.LENGTH, "stop_reason": None, "error": None}
            fields |= {"num_prompt_tokens": len(submit.prompt_token_ids), "num_completion_tokens": done + 1}
            finish = Finish(**fields)
        fields = dict.fromkeys(TokenDelta.__struct_fields__) | {"uid": submit.uid, "attempt": submit.attempt}
        return TokenDelta(**fields | {"index": done, "token_ids": (0,), "text": " the", "finish": finish})


class InstantWorker(Worker):
    """Worker process with the instant engine in place of the service's engine."""

    def build(self) -> Any:
        """Return an `InstantEngine` and made-up facts about it, in place of the service's engine."""
        from service.worker.engine_factory import EngineFacts  # imports torch, which the API process must not hold

        values: dict[str, Any] = dict.fromkeys(("device", "attention", "dtype", "matrices", "kv_cache_dtype"), "none")
        values |= {"kernel_level": None, "reasons": {}, "threads": 1, "kv_cache_bytes": 0}
        values |= {"num_blocks": 2**16, "block_size": 16, "max_context_length": self.manifest.config.max_context_length}
        return InstantEngine(step_seconds=float(os.environ[_STEP_MS]) / 1000.0), EngineFacts(**values)


def measure_level(
    service: ServiceProcess, num_streams: int, arguments: argparse.Namespace, repeats: int
) -> dict[str, Any]:
    """Return the API process's CPU time per token, and tokens/s, for a number of streams, measured `repeats` times."""
    count, num_tokens = num_streams * arguments.requests_per_stream, arguments.output_tokens
    requests = [
        LoadRequest(index=index, prompt="Once upon a time", max_tokens=num_tokens, temperature=0.0)
        for index in range(count)
    ]
    processes, tokens = service.processes("api"), count * num_tokens
    cpu, runs = list[float](), list[LoadRun]()
    for _ in range(repeats):
        before = cpu_seconds(processes)
        runs.append(complete_all(service.target, requests, num_streams=num_streams))
        cpu.append(max(cpu_seconds(processes) - before, _TICK_SECONDS))
    return {
        "num_streams": num_streams,
        "num_requests": count,
        "num_tokens": num_tokens,
        "tokens_per_second_on_one_core": spread(tokens / seconds for seconds in cpu),
        "cpu_us_per_token": spread(1e6 * seconds / tokens for seconds in cpu),
        "tokens_per_second": spread(tokens / run.duration_seconds for run in runs),
        "client_cpu_share": spread(run.client_cpu_share for run in runs),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the API process for every number of streams and every time between engine steps (`--step-ms`)."""
    levels = []
    for step_ms in arguments.step_ms:
        command = ["env", f"{_STEP_MS}={step_ms}", sys.executable, "-m", "loadtest.scenarios.bench_frontend", "serve"]
        with ServiceProcess([*command, "--checkpoint", str(arguments.checkpoint)]) as service:
            service.wait_first_token()
            measure_level(service, 1, arguments, 1)
            for num_streams in arguments.streams:
                show(f"{num_streams} streams, {step_ms:g} ms between steps")
                levels.append({"step_ms": step_ms} | measure_level(service, num_streams, arguments, arguments.repeats))
    return {"kind": "frontend", "levels": levels}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. With `serve` as first argument, run the service under test, with the instant engine."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["serve"]:
        settings = read_settings(ServeSettings, given[1:], command="serve", summary="")
        return build_server(settings, worker_class=InstantWorker).run()
    options = {
        "checkpoint": (Path, "checkpoint directory, for tokenizer and name"),
        "streams": ([1, 16, 64], "concurrent streams"),
        "step-ms": (
            [0.0, 4.0],
            "milliseconds between engine steps; 0: no pause, so that one write holds several tokens",
        ),
        "requests-per-stream": (8, "requests per stream"),
        "output-tokens": (200, "number of tokens in a completion"),
        "repeats": (3, "repeats of each measurement"),
    }
    return run_program("loadtest.scenarios.bench_frontend", __doc__, options, measure, given)


if __name__ == "__main__":
    raise SystemExit(main())
