"""Benchmark of a service that receives four times the requests it can serve.

    python -m loadtest.scenarios.bench_overload --checkpoint checkpoints/kvasir-9m --seconds 300 --out
    docs/results/overload.json

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
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress

from loadtest.client.service_discovery import discover
from loadtest.client.sse_client import API_KEY_VARIABLE, AsyncClient, Target
from loadtest.client.workload import CompletionRequest, Workload, WorkloadKind, WorkloadSpec
from loadtest.inprocess.bench_arguments import split_at_dashes
from loadtest.measurement.provenance import busy_seconds, provenance, quiet_or_warned, tell
from loadtest.scenarios.overload_load import (
    Load,
    closed_loop,
    growth_per_minute,
    histogram_between,
    numbered,
    open_loop,
    rate_of,
    ttft_of,
)
from loadtest.scenarios.service_process import ServiceFailed, ServiceProcess, cpu_seconds
from service.config.settings import ServeSettings, SettingsError, read_settings

_FIRST_REQUEST = CompletionRequest(index=0, prompt="Once", max_tokens=1)
_ERRORS = "llm_retry_after_error_seconds"
# A Retry-After counts as right if a slot is free within this time of it.
_RIGHT_SECONDS = 0.5
# Memory growth counts from here, in seconds: before, caches and pools fill.
_MEMORY_SETTLES = 20.0
_THROUGHPUT_AIM, _TTFT_AIM, _GROWTH_AIM = 0.95, 2.0, 2.0
_SDK_RETRIES = 10
_WORKLOAD_FIELDS = ("kind", "prompt_tokens", "output_tokens", "sigma", "seed")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """API keys of the flood and of the SDK user with its own key."""

    flood: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    polite: str = field(default_factory=lambda: secrets.token_urlsafe(24))


@contextmanager
def running(arguments: argparse.Namespace, serve: Sequence[str], keys: Keys) -> Iterator[ServiceProcess]:
    """Run the service on its own processors, and this process on the other ones."""
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = cores[:1], cores[1:] or cores
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
        file.write(f"flood: {keys.flood}\npolite: {keys.polite}\n")
        file.flush()
        service = ServiceProcess(arguments.checkpoint, ["--api-keys-file", file.name, *serve])
        service.target = dataclasses.replace(service.target, api_key=keys.flood)
        service.command = ["taskset", "--cpu-list", ",".join(map(str, theirs)), *service.command]
        os.sched_setaffinity(0, ours)
        try:
            with service:
                service.wait_first_token(_FIRST_REQUEST)
                yield service
        finally:
            os.sched_setaffinity(0, cores)


def workload_of(arguments: argparse.Namespace, target: Target) -> Workload:
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


@contextmanager
def other_work_during(load: str, service: ServiceProcess, figures: dict[str, float]) -> Iterator[None]:
    """Record the CPU cores used by processes that are neither the service nor this client."""

    def others() -> float:
        own = os.times()
        children = own.children_user + own.children_system
        return busy_seconds() - own.user - own.system - children - cpu_seconds(service.all_processes())

    began, before = time.perf_counter(), others()
    yield
    figures[load] = round((others() - before) / (time.perf_counter() - began), 3)


async def measure(
    arguments: argparse.Namespace, service: ServiceProcess, keys: Keys, num_places: int, progress: Progress
) -> dict[str, Any]:
    """Run the loads one after the other and return their figures."""
    task = progress.add_task("ramp", total=len(arguments.streams) + 3)
    workload = workload_of(arguments, service.target)
    requests = numbered(workload.request)
    others: dict[str, float] = {}
    client = AsyncClient(service.target)
    settle = arguments.settle_seconds

    async def closed(num_streams: int, seconds: float) -> Load:
        return await closed_loop(client, requests, num_streams=num_streams, seconds=seconds, settle_seconds=settle)

    levels = []
    for num_streams in arguments.streams:
        with other_work_during(f"{num_streams} streams", service, others):
            levels.append((num_streams, await closed(num_streams, arguments.level_seconds)))
        progress.advance(task)
    progress.update(task, description="saturation")
    with other_work_during("saturation", service, others):
        saturation = await closed(num_places, arguments.saturation_seconds)
    progress.advance(task)
    progress.update(task, description="overload")
    calm = [saturation, *(load for _, load in levels)]
    rate = arguments.times * max(load.requests_per_second for load in calm)
    parts = {"api": service.api_processes(), "worker": service.worker_processes()}
    watch, before = Watch(parts), scrape(service.target)
    with other_work_during("overload", service, others):
        overload, _, *users = await asyncio.gather(
            open_loop(
                client, requests, rate=rate, seconds=arguments.seconds, settle_seconds=settle, seed=arguments.seed
            ),
            watch.run(settle + arguments.seconds),
            sdk_user(service.target, keys.polite, arguments.seconds, retries=None),
            sdk_user(service.target, keys.flood, arguments.seconds, retries=_SDK_RETRIES),
        )
    after = scrape(service.target)
    progress.advance(task)
    progress.update(task, description="saturation again")
    with other_work_during("saturation again", service, others):
        again = await closed(num_places, arguments.saturation_seconds)
    await client.close()
    figures = {
        "levels": [{"streams": streams, **load.to_dict()} for streams, load in levels],
        "saturation": {"streams": num_places, **saturation.to_dict()},
        "saturation_again": {"streams": num_places, **again.to_dict()},
        "overload": {"times": arguments.times, "rate": round(rate, 2), **overload.to_dict()},
        "service": watch.to_dict(),
        "sdk": {"own_key": users[0], "key_of_the_flood": users[1]},
        "retry_after": accuracy(before, after),
        "workload": {name: getattr(workload.spec, name) for name in _WORKLOAD_FIELDS},
        "other_work_cores_during": others,
    }
    saturations = [saturation, again]
    peak = max(rate_of(saturations), *(load.tokens_per_second for _, load in levels))
    return figures | {"aims": aims(figures, peak, saturations, overload)}


def aims(figures: dict[str, Any], peak: float, saturations: Sequence[Load], overload: Load) -> dict[str, Any]:
    """Return each aim with its measured value, and whether it is met."""
    calm, full = ttft_of(saturations, 99), overload.ttft_seconds(99)
    ratio = full / calm if calm and full else None
    growth = {part: facts["growth_mib_per_minute"] for part, facts in figures["service"].items()}
    num_5xx = sum(
        count for failure, count in figures["overload"]["failures"].items() if failure.startswith("http_error: 5")
    )
    errors = {user: sum(facts["errors"].values()) for user, facts in figures["sdk"].items()}
    users = sum(facts["tokens_per_second"] for facts in figures["sdk"].values())
    share = (overload.tokens_per_second + users) / peak
    return {
        "throughput_share": {"value": round(share, 4), "aim": _THROUGHPUT_AIM, "met": share >= _THROUGHPUT_AIM},
        "ttft_p99_ratio": {
            "value": None if ratio is None else round(ratio, 3),
            "aim": _TTFT_AIM,
            "met": ratio is not None and ratio <= _TTFT_AIM,
        },
        "growth_mib_per_minute": {"value": growth, "aim": _GROWTH_AIM, "met": max(growth.values()) <= _GROWTH_AIM},
        "answers_of_5xx": {"value": num_5xx, "aim": 0, "met": num_5xx == 0},
        "failures": {
            "value": sum(figures["overload"]["failures"].values()),
            "aim": 0,
            "met": not figures["overload"]["failures"],
        },
        "errors_seen_by_sdk_users": {"value": errors, "aim": 0, "met": not any(errors.values())},
    }


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


def scrape(target: Target) -> str:
    """Return the service's metrics as text."""
    with urllib.request.urlopen(f"{target.url}/metrics", timeout=30) as response:
        return str(response.read().decode())


async def sdk_user(target: Target, key: str, seconds: float, *, retries: int | None) -> dict[str, Any]:
    """Run a user of the SDK in a separate process. Raises ServiceFailed if the process fails."""
    command = [sys.executable, "-m", "loadtest.scenarios.sdk_caller", "--url", target.url, "--seconds", str(seconds)]
    command += [] if retries is None else ["--max-retries", str(retries)]
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, API_KEY_VARIABLE: key}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate()
    if process.returncode:
        raise ServiceFailed(f"the SDK user's process failed: {err.decode()[-2000:]}")
    figures: dict[str, Any] = json.loads(out)
    return figures


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.scenarios.bench_overload",
        description="Send a service more requests than it can serve, and measure the requests it admits.",
        epilog="Arguments after -- go to `kvasir serve`, for example: -- --target-queue-seconds 1",
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint directory")
    add("--out", type=Path, metavar="FILE", help="write the JSON there (default: standard output)")
    add("--seconds", type=float, default=300.0, metavar="S", help="length of the overload (default: %(default)g)")
    add(
        "--times",
        type=float,
        default=4.0,
        metavar="X",
        help="overload rate relative to the highest rate seen (default: %(default)g)",
    )
    add(
        "--streams",
        type=int,
        nargs="+",
        default=[16, 32],
        metavar="N",
        help="streams of each step of the ramp (default: 16 32)",
    )
    add(
        "--level-seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="length of a step of the ramp (default: %(default)g)",
    )
    add(
        "--saturation-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="length of each of the two saturation loads (default: %(default)g)",
    )
    add(
        "--settle-seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="start of each load that does not count (default: %(default)g)",
    )
    add(
        "--prompt-tokens",
        type=int,
        default=64,
        metavar="N",
        help="approximate tokens of a prompt (default: %(default)s)",
    )
    add("--output-tokens", type=int, default=64, metavar="N", help="tokens of a completion (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="seed of workload and arrivals (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return the exit code: 0; 1 if the service failed."""
    given = list(sys.argv[1:] if argv is None else argv)
    own, serve = split_at_dashes(given)
    parser = _parser()
    arguments = parser.parse_args(own)
    try:
        flags = ["--checkpoint", str(arguments.checkpoint), *serve]
        settings = read_settings(ServeSettings, flags, command="serve", summary="")
    except SettingsError as error:
        parser.error(str(error))
    facts = provenance(parser.prog, given) | {"other_work_cores": quiet_or_warned(parser.prog)}
    keys = Keys()
    try:
        with (
            Progress(console=Console(stderr=True), transient=True) as progress,
            running(arguments, serve, keys) as service,
        ):
            result = asyncio.run(measure(arguments, service, keys, settings.max_num_running, progress))
    except ServiceFailed as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    tell(facts | {"kind": "overload", "serve": serve} | result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
