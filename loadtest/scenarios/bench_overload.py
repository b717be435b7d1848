"""Benchmark of a service that receives four times the requests it can serve.

    python -m loadtest.scenarios.bench_overload --checkpoint checkpoints/kvasir-9m --out docs/results/overload.json

The loads run one after the other on one service:

1. A ramp of closed loops finds the highest throughput.
2. Saturation: a closed loop with a stream for each slot (`--max-num-running`), so that no request waits. It gives
the TTFT at full load.
3. Overload: Poisson arrivals at four times the highest rate seen so far, all with one API key. Two users of
OpenAI's Python SDK run beside them. One has its own key and the SDK's default retries. The other has the key of the
flood and more retries.
4. Saturation again. Overload is compared with both saturation loads together, so that drift of the machine's speed
cancels.

Client and service share a machine, so each is pinned to its own processors, the same in all loads. With two
processors, the API process and the model share one. That is the hardest case: rejecting requests then takes CPU
from the model.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from loadtest.client.outcome import Ending, Outcome
from loadtest.client.service_discovery import discover
from loadtest.client.sse_client import API_KEY_VARIABLE, AsyncClient, Target
from loadtest.client.workload import Workload, WorkloadKind, WorkloadSpec
from loadtest.measurement.benchmark_program import benchmark_parser, read_arguments, run_benchmark, show
from loadtest.measurement.other_processes import ForeignWork
from loadtest.scenarios.closed_and_open_loop import Run, arrivals, run_closed, run_open
from loadtest.scenarios.service_process import ServiceFailed, ServiceProcess, cpu_seconds
from service.config.settings import ServeSettings, SettingsError, read_settings

_ERRORS = "llm_retry_after_error_seconds"
# A Retry-After counts as right if a slot is free within this time of it.
_RIGHT_SECONDS = 0.5
# Memory growth counts from here, in seconds: before, caches and pools fill.
_MEMORY_SETTLES = 20.0
_THROUGHPUT_AIM, _TTFT_AIM, _GROWTH_AIM = 0.95, 2.0, 2.0
_SDK_DEFAULT_RETRIES, _SDK_MORE_RETRIES = 2, 10
_WORKLOAD_FIELDS = ("kind", "prompt_tokens", "output_tokens", "sigma", "seed")


@dataclass(frozen=True, slots=True)
class Load:
    """One load, and the bounds of its steady part in seconds of `time.perf_counter()`.

    Throughput counts the tokens of finished completions that arrived in the steady part. A completion that extends
    beyond the steady part counts by the share of its chunks inside.
    """

    run: Run
    settled_seconds: float
    ended_seconds: float

    @property
    def seconds(self) -> float:
        """Length of the steady part."""
        return self.ended_seconds - self.settled_seconds

    @property
    def steady(self) -> list[Outcome]:
        """Outcomes of requests with an intended send in the steady part."""
        return [o for o in self.run.outcomes if self._is_inside(o.intended_seconds)]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of successful completions that arrived in the steady part, per second."""
        done = (o for o in self.run.outcomes if o.ending is Ending.OK and o.chunk_seconds)
        shares = (
            (o.completion_tokens, sum(map(self._is_inside, o.chunk_seconds)) / len(o.chunk_seconds)) for o in done
        )
        return sum(tokens * share for tokens, share in shares) / self.seconds

    @property
    def requests_per_second(self) -> float:
        """Completions that ended successfully in the steady part, per second."""
        return sum(o.ending is Ending.OK and self._is_inside(o.end_seconds) for o in self.run.outcomes) / self.seconds

    def _is_inside(self, seconds: float) -> bool:
        return self.settled_seconds <= seconds < self.ended_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        failures = Counter(f"{o.ending.value}: {o.detail}"[:120] for o in self.run.outcomes if o.ending.is_failure)
        ttfts = {f"p{p}": ttft_of([self], p) for p in (50, 90, 99)}
        return {
            "seconds": round(self.seconds, 1),
            "sent": len(self.steady),
            "sent_per_second": round(len(self.steady) / self.seconds, 2),
            "endings": dict(Counter(o.ending.value for o in self.steady)),
            "failures": dict(failures),
            "requests_per_second": round(self.requests_per_second, 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "ttft_ms": {name: None if ttft is None else round(1e3 * ttft, 1) for name, ttft in ttfts.items()},
            "client_cpu_share": round(self.run.client_cpu_share, 3),
        }


def ttft_of(loads: Sequence[Load], percentile: float) -> float | None:
    """Return a percentile of the TTFT over several loads, or None without a successful request."""
    outcomes = (outcome for load in loads for outcome in load.steady if outcome.ending is Ending.OK)
    ttfts = [outcome.ttft_seconds for outcome in outcomes if outcome.ttft_seconds is not None]
    return float(np.percentile(ttfts, percentile)) if ttfts else None


@dataclass(slots=True)
class Watch:
    """Sampler of memory and CPU time of the service's parts during a load."""

    parts: dict[str, list[psutil.Process]]
    rss_mib: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    cpu_share: dict[str, float] = field(default_factory=dict)

    async def run(self, seconds: float) -> None:
        """Sample once a second."""
        began = time.perf_counter()
        before = {part: cpu_seconds(processes) for part, processes in self.parts.items()}
        while (now := time.perf_counter() - began) < seconds:
            for part, processes in self.parts.items():
                rss = sum(process.memory_info().rss for process in processes) / 2**20
                self.rss_mib.setdefault(part, []).append((now, rss))
            await asyncio.sleep(1.0)
        for part, processes in self.parts.items():
            self.cpu_share[part] = (cpu_seconds(processes) - before[part]) / (time.perf_counter() - began)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        return {part: self._summary(part, samples) for part, samples in self.rss_mib.items()}

    def _summary(self, part: str, samples: list[tuple[float, float]]) -> dict[str, float]:
        settled = [sample for sample in samples if sample[0] >= _MEMORY_SETTLES] or samples
        return {
            "first_mib": round(settled[0][1], 1),
            "last_mib": round(settled[-1][1], 1),
            "most_mib": round(max(rss for _, rss in samples), 1),
            "growth_mib_per_minute": round(growth_per_minute(settled), 3),
            "cpu_share": round(self.cpu_share[part], 3),
        }


def growth_per_minute(samples: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope of values over seconds, per minute; 0 for fewer than two samples."""
    seconds, values = np.array(samples, dtype=np.float64).T
    return 60.0 * float(np.polyfit(seconds, values, 1)[0]) if len(samples) > 1 else 0.0


@contextmanager
def running(arguments: argparse.Namespace, flood: str, polite: str) -> Iterator[ServiceProcess]:
    """Run the service with these API keys on its own processors, and this process on the other ones."""
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = cores[:1], cores[1:] or cores
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
        file.write(f"flood: {flood}\npolite: {polite}\n")
        file.flush()
        service = ServiceProcess(arguments.checkpoint, ["--api-keys-file", file.name, *arguments.serve])
        service.target = dataclasses.replace(service.target, api_key=flood)
        service.command = ["taskset", "--cpu-list", ",".join(map(str, theirs)), *service.command]
        os.sched_setaffinity(0, ours)
        try:
            with service:
                service.wait_first_token()
                yield service
        finally:
            os.sched_setaffinity(0, cores)


def _workload(arguments: argparse.Namespace, target: Target) -> Workload:
    """Return a workload that fits the service."""
    discovered = discover(target)
    # Requests of one length that begin together also end together, and the load would come in waves.
    spec = WorkloadSpec(
        kind=WorkloadKind.LOGNORMAL,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        max_context_tokens=discovered.max_context_tokens or WorkloadSpec().max_context_tokens,
        seed=arguments.seed,
    )
    return Workload(spec, discovered.passages)


async def measure(
    arguments: argparse.Namespace, service: ServiceProcess, polite: str, num_slots: int
) -> dict[str, Any]:
    """Run the loads one after the other and return their figures."""
    workload = _workload(arguments, service.target)
    requests = map(workload.request, itertools.count())
    client, settle, others = AsyncClient(service.target), arguments.settle_seconds, {}

    async def load(label: str, seconds: float, send: Callable[[float], Awaitable[Run]]) -> Load:
        """Run a load whose steady part takes `seconds`, and record the CPU use of other processes."""
        show(label)
        foreign, began = ForeignWork(), time.perf_counter()
        run = await send(settle + seconds)
        others[label] = round(foreign.cores(), 3)
        return Load(run, began + settle, began + settle + seconds)

    async def closed(label: str, num_streams: int, seconds: float) -> Load:
        def send(total: float) -> Awaitable[Run]:
            end = time.perf_counter() + total
            timely = itertools.takewhile(lambda _: time.perf_counter() < end, requests)
            return run_closed(client, timely, model=None, num_streams=num_streams)

        return await load(label, seconds, send)

    levels = [(n, await closed(f"{n} streams", n, arguments.level_seconds)) for n in arguments.streams]
    saturation = await closed("saturation", num_slots, arguments.saturation_seconds)
    rate = arguments.times * max(calm.requests_per_second for calm in (saturation, *(level for _, level in levels)))
    watch = Watch({"api": service.api_processes(), "worker": service.worker_processes()})
    before = scrape(service.target)

    def flood(total: float) -> Awaitable[Run]:
        offsets = itertools.takewhile(lambda offset: offset < total, arrivals(rate, arguments.seed))
        return run_open(client, requests, model=None, offsets=offsets)

    overload, _, *users = await asyncio.gather(
        load("overload", arguments.seconds, flood),
        watch.run(settle + arguments.seconds),
        sdk_user(service.target, polite, arguments.seconds, _SDK_DEFAULT_RETRIES),
        sdk_user(service.target, client.target.api_key or "", arguments.seconds, _SDK_MORE_RETRIES),
    )
    after = scrape(service.target)
    again = await closed("saturation again", num_slots, arguments.saturation_seconds)
    await client.close()
    figures = {
        "levels": [{"streams": streams, **level.to_dict()} for streams, level in levels],
        "saturation": {"streams": num_slots, **saturation.to_dict()},
        "saturation_again": {"streams": num_slots, **again.to_dict()},
        "overload": {"times": arguments.times, "rate": round(rate, 2), **overload.to_dict()},
        "service": watch.to_dict(),
        "sdk": {"own_key": users[0], "key_of_the_flood": users[1]},
        "retry_after": accuracy(before, after),
        "workload": {name: getattr(workload.spec, name) for name in _WORKLOAD_FIELDS},
        "other_work_cores_during": others,
    }
    both = (saturation.tokens_per_second + again.tokens_per_second) / 2  # both have the same length
    peak = max(both, *(level.tokens_per_second for _, level in levels))
    return figures | {"aims": aims(figures, peak, [saturation, again], overload)}


def aims(figures: dict[str, Any], peak: float, saturations: Sequence[Load], overload: Load) -> dict[str, Any]:
    """Return each aim with its measured value, and whether it is met."""
    calm, full = ttft_of(saturations, 99), ttft_of([overload], 99)
    ratio = round(full / calm, 3) if calm and full else None
    growth = {part: facts["growth_mib_per_minute"] for part, facts in figures["service"].items()}
    failures = figures["overload"]["failures"]
    num_5xx = sum(count for failure, count in failures.items() if failure.startswith("http_error: 5"))
    errors = {user: sum(facts["errors"].values()) for user, facts in figures["sdk"].items()}
    users = sum(facts["tokens_per_second"] for facts in figures["sdk"].values())
    share = round((overload.tokens_per_second + users) / peak, 4)
    rows = {
        "throughput_share": (share, _THROUGHPUT_AIM, share >= _THROUGHPUT_AIM),
        "ttft_p99_ratio": (ratio, _TTFT_AIM, ratio is not None and ratio <= _TTFT_AIM),
        "growth_mib_per_minute": (growth, _GROWTH_AIM, max(growth.values()) <= _GROWTH_AIM),
        "answers_of_5xx": (num_5xx, 0, num_5xx == 0),
        "failures": (sum(failures.values()), 0, not failures),
        "errors_seen_by_sdk_users": (errors, 0, not any(errors.values())),
    }
    return {name: dict(zip(("value", "aim", "met"), row, strict=True)) for name, row in rows.items()}


def accuracy(before: str, after: str) -> dict[str, Any]:
    """Return the error of Retry-After estimates, from the service's own metric."""
    buckets = histogram_between(before, after, _ERRORS)
    total = sum(count for _, count in buckets)
    right = sum(count for bound, count in buckets if -_RIGHT_SECONDS < bound <= _RIGHT_SECONDS)
    return {
        "promises_watched": total,
        f"share_within_{_RIGHT_SECONDS:g}_s": round(right / total, 4) if total else None,
        "error_seconds": {f"{bound:g}": count for bound, count in buckets if count},
    }


def histogram_between(before: str, after: str, name: str) -> list[tuple[float, int]]:
    """Return what a Prometheus histogram gained between two scrapes: (upper bound, count), not cumulative."""
    first, last = _buckets(before, name), _buckets(after, name)
    counts = [(bound, count - first.get(bound, 0)) for bound, count in sorted(last.items())]
    lower = [0, *(count for _, count in counts)]
    return [(bound, count - below) for (bound, count), below in zip(counts, lower[:-1], strict=True)]


def _buckets(text: str, name: str) -> dict[float, int]:
    lines = (line for line in text.splitlines() if line.startswith(f"{name}_bucket{{"))
    return {float(line.partition('le="')[2].partition('"')[0]): round(float(line.rpartition(" ")[2])) for line in lines}


def scrape(target: Target) -> str:
    """Return the service's metrics as text."""
    with urllib.request.urlopen(f"{target.url}/metrics", timeout=30) as response:
        return str(response.read().decode())


async def sdk_user(target: Target, key: str, seconds: float, retries: int) -> dict[str, Any]:
    """Run a user of the SDK in a separate process. Raises ServiceFailed if the process fails."""
    program = [sys.executable, "-m", "loadtest.scenarios.sdk_caller", target.url, str(seconds), str(retries)]
    process = await asyncio.create_subprocess_exec(
        *program, env={**os.environ, API_KEY_VARIABLE: key}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate()
    if process.returncode:
        raise ServiceFailed(f"the SDK user's process failed: {err.decode()[-2000:]}")
    figures: dict[str, Any] = json.loads(out)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return the exit code: 0; 1 if the service failed; 2 for invalid arguments."""
    parser = benchmark_parser(
        "loadtest.scenarios.bench_overload",
        "Send a service more requests than it can serve, and measure the requests it admits.",
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint directory")
    text = "streams of each step of the ramp (default: 16 32)"
    add("--streams", type=int, nargs="+", default=[16, 32], metavar="N", help=text)
    for name, default, text in (
        ("seconds", 300.0, "length of the overload"),
        ("times", 4.0, "overload rate relative to the highest rate seen"),
        ("level-seconds", 20.0, "length of a step of the ramp"),
        ("saturation-seconds", 60.0, "length of each of the two saturation loads"),
        ("settle-seconds", 5.0, "start of each load that does not count"),
        ("prompt-tokens", 64, "approximate tokens of a prompt"),
        ("output-tokens", 64, "tokens of a completion"),
        ("seed", 0, "seed of workload and arrivals"),
    ):
        add(f"--{name}", type=type(default), default=default, metavar="N", help=f"{text} (default: {default:g})")
    arguments = read_arguments(parser, argv)
    try:
        flags = ["--checkpoint", str(arguments.checkpoint), *arguments.serve]
        settings = read_settings(ServeSettings, flags, command="serve", summary="")
    except SettingsError as error:
        parser.error(str(error))

    def loads() -> dict[str, Any]:
        flood, polite = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        with running(arguments, flood, polite) as service:
            figures = asyncio.run(measure(arguments, service, polite, settings.max_num_running))
        return {"kind": "overload", "serve": arguments.serve} | figures

    return run_benchmark(parser, arguments, loads)


if __name__ == "__main__":
    raise SystemExit(main())
