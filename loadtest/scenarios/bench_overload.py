"""Benchmark of a service that receives four times the requests it can serve.

    python -m loadtest.scenarios.bench_overload --checkpoint checkpoints/kvasir-9m --out docs/results/overload.json

The loads run one after the other on one service:

1. A ramp of closed loops finds the highest throughput.
2. Saturation: a closed loop with a stream for each slot (`--max-num-running`) gives the TTFT at full load.
3. Overload: Poisson arrivals at four times the highest rate seen so far, all with one API key. Two users of
OpenAI's Python SDK run beside them: one with another key and the SDK's default retries, one with the same key and more
retries.
4. Saturation again, so that drift of the machine's speed cancels.

Client and service are pinned to different processors, the same in all loads.
"""

import argparse
import asyncio
import dataclasses
import itertools
import multiprocessing
import os
import secrets
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
from prometheus_client.parser import text_string_to_metric_families

from loadtest.client.outcome import Ending, Outcome
from loadtest.client.service_discovery import discover
from loadtest.client.sse_client import AsyncClient, Target
from loadtest.client.workload import Workload, WorkloadKind, WorkloadSpec
from loadtest.measurement.benchmark_program import benchmark_parser, read_arguments, run_benchmark, show
from loadtest.measurement.provenance import ForeignWork
from loadtest.scenarios.closed_and_open_loop import LoadRun, arrivals, run_closed, run_open
from loadtest.scenarios.service_process import ServiceProcess, cpu_seconds, kvasir_serve
from service.config.settings import ServeSettings, SettingsError, read_settings

_RETRY_AFTER_ERRORS = "llm_retry_after_error_seconds"
# A Retry-After counts as right if a slot is free within this time of it.
_RIGHT_SECONDS = 0.5
# Memory growth counts from here, in seconds: before, caches and pools fill.
_MEMORY_SETTLES = 20.0
_THROUGHPUT_AIM, _TTFT_AIM, _GROWTH_AIM = 0.95, 2.0, 2.0
_SDK_DEFAULT_RETRIES, _SDK_MORE_RETRIES = 2, 10
_WORKLOAD_FIELDS = ("kind", "prompt_tokens", "output_tokens", "sigma", "seed")


@dataclass(frozen=True, slots=True)
class TimedLoad:
    """One load, and the bounds of its steady part in seconds of `time.perf_counter()`.

    Throughput counts the tokens of finished completions that arrived in the steady part. A completion that extends
    beyond the steady part counts by the share of its chunks inside.
    """

    run: LoadRun
    settled_seconds: float
    ended_seconds: float

    @property
    def seconds(self) -> float:
        """Length of the steady part."""
        return self.ended_seconds - self.settled_seconds

    @property
    def steady(self) -> list[Outcome]:
        """Outcomes of requests with an intended send in the steady part."""
        return [outcome for outcome in self.run.outcomes if self._is_inside(outcome.intended_seconds)]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of successful completions that arrived in the steady part, per second."""
        done = (o for o in self.run.outcomes if o.ending is Ending.OK and o.chunk_seconds)
        tokens = (o.completion_tokens * sum(map(self._is_inside, o.chunk_seconds)) / len(o.chunk_seconds) for o in done)
        return sum(tokens) / self.seconds

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
            "endings": dict(Counter(outcome.ending.value for outcome in self.steady)),
            "failures": dict(failures),
            "requests_per_second": round(self.requests_per_second, 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "ttft_ms": {name: None if ttft is None else round(1e3 * ttft, 1) for name, ttft in ttfts.items()},
            "client_cpu_share": round(self.run.client_cpu_share, 3),
        }


def ttft_of(loads: Sequence[TimedLoad], percentile: float) -> float | None:
    """Return a percentile of the TTFT over several loads, or None without a successful request."""
    outcomes = (outcome for load in loads for outcome in load.steady if outcome.ending is Ending.OK)
    ttfts = [outcome.ttft_seconds for outcome in outcomes if outcome.ttft_seconds is not None]
    return float(np.percentile(ttfts, percentile)) if ttfts else None


async def watch_processes(service: ServiceProcess, seconds: float) -> dict[str, Any]:
    """Sample memory and CPU time of the API process and the worker, once a second."""
    parts = {"api": service.api_processes(), "worker": service.worker_processes()}
    samples: dict[str, list[tuple[float, float]]] = {part: [] for part in parts}
    before, began = {part: cpu_seconds(processes) for part, processes in parts.items()}, time.perf_counter()
    while (now := time.perf_counter() - began) < seconds:
        for part, processes in parts.items():
            samples[part].append((now, sum(process.memory_info().rss for process in processes) / 2**20))
        await asyncio.sleep(1.0)
    wall, figures = time.perf_counter() - began, {}
    for part, processes in parts.items():
        settled = [sample for sample in samples[part] if sample[0] >= _MEMORY_SETTLES] or samples[part]
        figures[part] = {
            "first_mib": round(settled[0][1], 1),
            "last_mib": round(settled[-1][1], 1),
            "most_mib": round(max(rss for _, rss in samples[part]), 1),
            "growth_mib_per_minute": round(growth_per_minute(settled), 3),
            "cpu_share": round((cpu_seconds(processes) - before[part]) / wall, 3),
        }
    return figures


def growth_per_minute(samples: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope of values over seconds, per minute; 0 for fewer than two samples."""
    seconds, values = np.array(samples, dtype=np.float64).T
    return 60.0 * float(np.polyfit(seconds, values, 1)[0]) if len(samples) > 1 else 0.0


@contextmanager
def running(arguments: argparse.Namespace, flood: str, polite: str) -> Iterator[ServiceProcess]:
    """Run the service with these API keys on its own processors, and this process on the other ones."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
        file.write(f"flood: {flood}\npolite: {polite}\n")
        file.flush()
        command = kvasir_serve(arguments.checkpoint, ["--api-keys-file", file.name, *arguments.serve])
        service = ServiceProcess(["taskset", "--cpu-list", ",".join(map(str, cores[1:] or cores)), *command])
        service.target = dataclasses.replace(service.target, api_key=flood)
        os.sched_setaffinity(0, cores[:1])
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

    async def load(label: str, seconds: float, send: Callable[[float], Awaitable[LoadRun]]) -> TimedLoad:
        """Run a load whose steady part takes `seconds`, and record the CPU use of other processes."""
        show(label)
        foreign, began = ForeignWork(), time.perf_counter()
        run = await send(settle + seconds)
        others[label] = round(foreign.cores(), 3)
        return TimedLoad(run, began + settle, began + settle + seconds)

    async def closed(label: str, num_streams: int, seconds: float) -> TimedLoad:
        def send(total: float) -> Awaitable[LoadRun]:
            end = time.perf_counter() + total
            timely = itertools.takewhile(lambda _: time.perf_counter() < end, requests)
            return run_closed(client, timely, model=None, num_streams=num_streams)

        return await load(label, seconds, send)

    levels = [(n, await closed(f"{n} streams", n, arguments.level_seconds)) for n in arguments.streams]
    saturation = await closed("saturation", num_slots, arguments.saturation_seconds)
    rate = arguments.times * max(calm.requests_per_second for calm in (saturation, *(level for _, level in levels)))
    before = scrape(service.target)

    def flood(total: float) -> Awaitable[LoadRun]:
        offsets = itertools.takewhile(lambda offset: offset < total, arrivals(rate, arguments.seed))
        return run_open(client, requests, model=None, offsets=offsets)

    keys = (polite, _SDK_DEFAULT_RETRIES), (client.target.api_key or "", _SDK_MORE_RETRIES)
    overload, processes, own_key, key_of_the_flood = await asyncio.gather(
        load("overload", arguments.seconds, flood),
        watch_processes(service, settle + arguments.seconds),
        *(_sdk_user(service.target.url, key, arguments.seconds, retries) for key, retries in keys),
    )
    after = scrape(service.target)
    again = await closed("saturation again", num_slots, arguments.saturation_seconds)
    await client.close()
    figures = {
        "levels": [{"streams": streams, **level.to_dict()} for streams, level in levels],
        "saturation": {"streams": num_slots, **saturation.to_dict()},
        "saturation_again": {"streams": num_slots, **again.to_dict()},
        "overload": {"times": arguments.times, "rate": round(rate, 2), **overload.to_dict()},
        "service": processes,
        "sdk": {"own_key": own_key, "key_of_the_flood": key_of_the_flood},
        "retry_after": retry_after_errors(before, after),
        "workload": {name: getattr(workload.spec, name) for name in _WORKLOAD_FIELDS},
        "other_work_cores_during": others,
    }
    both = (saturation.tokens_per_second + again.tokens_per_second) / 2  # both have the same length
    peak = max(both, *(level.tokens_per_second for _, level in levels))
    return figures | {"aims": aims(figures, peak, [saturation, again], overload)}


def aims(figures: dict[str, Any], peak: float, saturations: Sequence[TimedLoad], overload: TimedLoad) -> dict[str, Any]:
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


def retry_after_errors(before: str, after: str) -> dict[str, Any]:
    """Return the error of Retry-After estimates, from two scrapes of the service's histogram."""
    first, last = _cumulative_buckets(before), _cumulative_buckets(after)
    cumulative = [last[bound] - first.get(bound, 0) for bound in sorted(last)]
    counts = dict(zip(sorted(last), (b - a for a, b in itertools.pairwise([0, *cumulative])), strict=True))
    total, right = (
        sum(counts.values()),
        sum(n for bound, n in counts.items() if -_RIGHT_SECONDS < bound <= _RIGHT_SECONDS),
    )
    return {
        "promises_watched": total,
        f"share_within_{_RIGHT_SECONDS:g}_s": round(right / total, 4) if total else None,
        "error_seconds": {f"{bound:g}": count for bound, count in counts.items() if count},
    }


def _cumulative_buckets(text: str) -> dict[float, int]:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {float(s.labels["le"]): round(s.value) for s in samples if s.name == f"{_RETRY_AFTER_ERRORS}_bucket"}


def scrape(target: Target) -> str:
    """Return the service's metrics as text."""
    with urllib.request.urlopen(f"{target.url}/metrics", timeout=30) as response:
        return str(response.read().decode())


async def _sdk_user(*arguments: Any) -> dict[str, Any]:
    """Run `call_by_sdk` in a separate process, so that its user does not wait for the other clients."""
    pool = ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))
    try:
        return await asyncio.wrap_future(pool.submit(call_by_sdk, *arguments))
    finally:
        pool.shutdown(wait=False)  # waiting would stop the event loop of the other clients


def call_by_sdk(url: str, key: str, seconds: float, max_retries: int) -> dict[str, Any]:
    """Send streamed completions one after the other by OpenAI's SDK. Return the figures of this user.

    errors: exceptions that the caller saw, by name. refusals: responses of 4xx and 5xx that the SDK's retries hid.
    tokens_per_second: chunks with text; each is a token unless text was held back.
    """
    statuses: Counter[int] = Counter()
    errors: Counter[str] = Counter()
    ttfts: list[float] = []
    num_tokens, end = 0, time.perf_counter() + seconds
    with httpx.Client(event_hooks={"response": [lambda response: statuses.update([response.status_code])]}) as http:
        client = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key=key,
            max_retries=max_retries,
            http_client=http,  # type: ignore[arg-type]  # newer versions name another package with the same interface
        )
        model, prompt = client.models.list().data[0].id, "Once upon a time, in a kingdom by the sea,"
        while time.perf_counter() < end:
            began = time.perf_counter()
            try:
                first = None
                for chunk in client.completions.create(model=model, prompt=prompt, max_tokens=16, stream=True):
                    first = time.perf_counter() - began if first is None else first
                    num_tokens += bool(chunk.choices and chunk.choices[0].text)
                ttfts.append(time.perf_counter() - began if first is None else first)
            except openai.OpenAIError as error:
                errors[f"{type(error).__name__}: {error}"[:120]] += 1
    return {
        "max_retries": max_retries,
        "completions": len(ttfts),
        "tokens_per_second": round(num_tokens / seconds, 2),
        "errors": dict(errors),
        "refusals": {str(status): count for status, count in sorted(statuses.items()) if status >= 400},
        "seconds_to_first_chunk": {f"p{p}": float(np.percentile(ttfts, p)) for p in (50, 90, 99) if ttfts},
    }


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
