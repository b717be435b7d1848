"""Benchmark of a service that receives four times the requests it can serve.

Saturation, a closed loop of --max-num-running streams, is measured before and after the overload, so that drift of the
machine's speed cancels. The overload has Poisson arrivals, and two clients that use OpenAI's Python SDK.
"""

import argparse
import itertools
import multiprocessing
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import numpy as np
import openai
from prometheus_client.samples import Sample

from loadtest.client.outcome import LoadRun
from loadtest.client.report import Slo, summarize, without_details
from loadtest.client.sse_client import CompletionClient, discover
from loadtest.client.workload import WorkloadKind, WorkloadSpec
from loadtest.measurement.benchmark_program import MeasurementFailed, run_program, show
from loadtest.scenarios.service_benchmark import ServiceProcess, kvasir_serve, run_closed, serve_settings
from loadtest.sweep.open_loop import OpenLoop
from loadtest.sweep.page import write_report
from loadtest.sweep.server_side import read_samples

_MEMORY_SETTLES = 20  # first samples of memory, one per second, that do not count: caches and pools still fill


def watch_memory(service: ServiceProcess, seconds: float) -> dict[str, Any]:
    """Sample resident memory of API process and worker every second. Return its growth per minute and last value."""
    parts, end = {part: service.processes(part) for part in ("api", "worker")}, time.perf_counter() + seconds
    samples: dict[str, list[tuple[float, float]]] = {part: [] for part in parts}
    while (now := time.perf_counter()) < end:
        for part, processes in parts.items():
            samples[part].append((now, sum(process.memory_info().rss for process in processes) / 2**20))
        gevent.sleep(1.0)
    growth = {part: growth_per_minute(values[_MEMORY_SETTLES:] or values) for part, values in samples.items()}
    last = {part: round(values[-1][1], 1) for part, values in samples.items()}
    return {part: {"last_mib": last[part], "growth_mib_per_minute": round(growth[part], 3)} for part in parts}


def growth_per_minute(samples: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares growth per minute of (seconds, value) samples; 0 for fewer than two samples."""
    seconds, values = np.array(samples, dtype=np.float64).T
    return 60.0 * float(np.polyfit(seconds, values, 1)[0]) if len(samples) > 1 else 0.0


def retry_after_errors(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return from `/metrics` the number of checked Retry-After values, and the share with an error of at most 0.5 s."""
    buckets = (sample for sample in samples if sample.name == "llm_retry_after_error_seconds_bucket")
    counts = {float(sample.labels["le"]): round(sample.value) for sample in buckets}
    total = counts[float("inf")]
    share = round((counts[0.5] - counts[-0.5]) / total, 4) if total else None
    return {"promises_watched": total, "share_within_0.5_s": share}


def call_by_sdk(url: str, key: str, seconds: float, max_retries: int) -> dict[str, Any]:
    """Request streamed completions one by one with OpenAI's SDK. Return their number, tokens/s and the SDK's errors."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=max_retries)
    model, prompt = client.models.list().data[0].id, "Once upon a time, in a kingdom by the sea,"
    result, errors = {"max_retries": max_retries, "completions": 0, "tokens_per_second": 0.0}, Counter[str]()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        try:
            for chunk in client.completions.create(model=model, prompt=prompt, max_tokens=16, stream=True):
                result["tokens_per_second"] += bool(chunk.choices and chunk.choices[0].text) / seconds
            result["completions"] += 1
        except openai.OpenAIError as error:
            errors[f"{type(error).__name__}: {error}"[:120]] += 1
    return result | {"errors": dict(errors)}


def send(load: OpenLoop, rate: float, settle_seconds: float, seconds: float) -> LoadRun:
    """Send requests at a rate until all have ended that were meant to be sent within the counted time."""
    start, count = (time.perf_counter(), time.process_time()), max(1, round(rate))
    began, ended = start[0] + settle_seconds, start[0] + settle_seconds + seconds
    with closing(load.windows(count, count / rate)) as windows:
        for window in windows:
            counted = (outcome for outcome in window.outcomes if outcome.intended_seconds <= ended)
            if window.ended_seconds > ended and all(outcome.end_seconds for outcome in counted):
                break
    done = [outcome for outcome in window.outcomes if outcome.end_seconds]
    return replace(LoadRun.ended_now(done, *start), began_seconds=began, ended_seconds=ended)


def measure_loads(
    arguments: argparse.Namespace, service: ServiceProcess, other_key: str, num_slots: int
) -> dict[str, Any]:
    """Measure saturation, overload, and saturation again. Return figures of the loads, SDK clients and Retry-After.

    Raises MeasurementFailed if no request ends at saturation.
    """
    target, settle = service.target, arguments.settle_seconds
    sizes = {name: getattr(arguments, name) for name in ("prompt_tokens", "output_tokens", "seed")}
    # Requests of one length that begin together also end together, and the load would come in waves.
    model, workload = discover(target, WorkloadSpec(kind=WorkloadKind.LOGNORMAL, **sizes))
    requests = map(workload.request, itertools.count())

    def saturate(client: CompletionClient) -> LoadRun:
        """Run a closed loop with a stream for each slot, and count all but its first seconds."""
        began = time.perf_counter() + settle
        ended = began + arguments.saturation_seconds
        timely = itertools.takewhile(lambda _: time.perf_counter() < ended, requests)
        run = run_closed(client, timely, num_streams=num_slots)
        return replace(run, began_seconds=began, ended_seconds=ended)

    with closing(CompletionClient(target)) as client:
        show("saturation")
        saturation = saturate(client)
        if not saturation.requests_per_second:
            raise MeasurementFailed("no request ended at saturation; choose more --saturation-seconds")
        show("overload")
        rate = arguments.times * saturation.requests_per_second
        load = OpenLoop(client, requests, model=model, seed=arguments.seed)
        # Separate processes, so that the clients with the SDK do not wait for the other clients of the load test.
        with ProcessPoolExecutor(max_workers=2, mp_context=multiprocessing.get_context("spawn")) as pool:
            users = {"own_key": (other_key, 2), "key_of_the_flood": (str(target.api_key), 10)}
            calls = {name: pool.submit(call_by_sdk, target.url, key, arguments.seconds, retries)
                     for name, (key, retries) in users.items()}  # fmt: skip
            memory = gevent.spawn(watch_memory, service, settle + arguments.seconds)
            overload = send(load, rate, settle, arguments.seconds)
            sdk = {name: call.result() for name, call in calls.items()}
        retry_after = retry_after_errors(read_samples(target))
        show("saturation again")
        again = saturate(client)
    capacity = (saturation.tokens_per_second + again.tokens_per_second) / 2
    served = overload.tokens_per_second + sum(user["tokens_per_second"] for user in sdk.values())
    figures = [
        without_details(summarize(load, label=label, slo=Slo()))
        for label, load in (("saturation", saturation), ("overload", overload), ("saturation again", again))
    ]
    before, during, after = (load["p99_ttft_ms"] for load in figures)
    return {
        "url": target.url,
        "model_id": model,
        "rate": round(rate, 2),
        "loads": figures,
        "throughput_share": round(served / capacity, 4),
        "ttft_p99_ratio": round(2 * during / (before + after), 3) if before and during and after else None,
        "service": memory.get(),
        "sdk": sdk,
        "retry_after": retry_after,
        "workload": asdict(workload.spec),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all loads on a service with two API keys. The clients use one processor, and the service all others."""
    num_slots = serve_settings(arguments).max_num_running
    cores = sorted(os.sched_getaffinity(0))
    flood, polite = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
        file.write(f"flood: {flood}\npolite: {polite}\n")
        file.flush()
        command = kvasir_serve(arguments.checkpoint, ["--api-keys-file", file.name, *arguments.serve])
        os.sched_setaffinity(0, cores[:1])
        try:
            with ServiceProcess(["taskset", "--cpu-list", ",".join(map(str, cores[1:] or cores)), *command]) as service:
                service.target = replace(service.target, api_key=flood)
                service.wait_first_token()
                figures = measure_loads(arguments, service, polite, num_slots)
        finally:
            os.sched_setaffinity(0, cores)
    return {"kind": "overload", "serve": arguments.serve} | figures


_OPTIONS = {
    "checkpoint": (Path, "checkpoint directory"),
    "seconds": (300.0, "seconds of overload"),
    "times": (4.0, "request rate of the overload, as a multiple of the rate at saturation"),
    "saturation-seconds": (60.0, "seconds of each of the two saturation loads"),
    "settle-seconds": (5.0, "seconds at the start of each load that do not count"),
    "prompt-tokens": (64, "approximate number of tokens in a prompt"),
    "output-tokens": (64, "number of tokens in a completion"),
    "seed": (0, "seed of the requests and of their arrival times"),
}
main = partial(run_program, "loadtest.scenarios.bench_overload", __doc__, _OPTIONS, measure, report=write_report)


if __name__ == "__main__":
    raise SystemExit(main())
