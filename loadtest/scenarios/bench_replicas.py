"""Benchmark of two replicas behind a router: prefix hits by policy, requests lost in failures, and throughput.

A replica is a service on a core of its own. The router is a program with the options `--worker-urls`, `--policy` and
`--port`, such as vllm-router. It and the clients use all cores.
"""

import argparse
import itertools
import os
import random
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import gevent.event

from loadtest.client.outcome import Ending, LoadRun, Outcome
from loadtest.client.report import Slo, summarize
from loadtest.client.requests import ChatRequest, LoadRequest
from loadtest.client.sse_client import CompletionClient, Target, discover
from loadtest.client.workload import Workload, WorkloadKind, WorkloadSpec
from loadtest.measurement.benchmark_program import ForeignWork, MeasurementFailed, run_program, show
from loadtest.measurement.figures import ratio_spread
from loadtest.scenarios.service_benchmark import ServiceProcess, check_success, cpu_seconds, kvasir_serve, run_closed
from loadtest.sweep.server_side import scrape

_CASES = (("cache_aware", 1), ("cache_aware", 2), ("round_robin", 2))
_CONVERSATIONS, _TURNS, _TURN_TOKENS, _LONG_TOKENS = 15, 5, 48, 128
_RETRIES, _FIRST_BACKOFF_SECONDS = 2, 0.5  # of OpenAI's SDKs


class RetryingClient(CompletionClient):
    """Client that repeats each failed or rejected request, from its beginning if it broke within a stream.

    retried: number of repeated requests by the reason.
    """

    def __init__(self, target: Target, model: str) -> None:
        super().__init__(target)
        self._model = model
        self.retried = Counter[str]()

    def complete(self, request: LoadRequest, *, intended_seconds: float | None = None, **_: Any) -> Outcome:
        """Send one request and return the outcome of its last attempt, with the time at which the first was meant."""
        for attempt in itertools.count():
            outcome = super().complete(request, model=self._model, intended_seconds=intended_seconds)
            if attempt == _RETRIES or not (outcome.ending.is_failure or outcome.ending is Ending.SHED):
                break
            self.retried[f"{outcome.ending.value}: {outcome.detail}"[:80]] += 1
            intended_seconds = outcome.intended_seconds
            gevent.sleep(_FIRST_BACKOFF_SECONDS * 2**attempt)
        return outcome


def traffic(workload: Workload) -> Iterator[LoadRequest]:
    """Yield requests without end. Half are the workload's, and half the next turns of 15 conversations of 5 turns.

    The order is random. The assistant's texts of a conversation are the workload's, not the model's.
    """
    spec = workload.spec
    talk = replace(spec, kind=WorkloadKind.FIXED, prompt_tokens=_TURN_TOKENS, seed=spec.seed + 1)
    texts, rng = Workload(talk, workload.passages), random.Random(spec.seed)
    conversations: list[list[str]] = [[] for _ in range(_CONVERSATIONS)]
    for index in itertools.count():
        if rng.random() < 0.5:
            yield workload.request(index)
            continue
        said, turn = rng.choice(conversations), texts.request(index)
        if len(said) >= 2 * _TURNS:
            said.clear()
        said += [str(turn.prompt), str(texts.request(-index).prompt)]
        yield ChatRequest(index=index, prompt=said[:-1], max_tokens=turn.max_tokens, seed=turn.seed)


def start_replica(arguments: argparse.Namespace, index: int, port: int = 0) -> ServiceProcess:
    """Start replica number `index` on the core of its number."""
    cores = sorted(os.sched_getaffinity(0))
    command = kvasir_serve(arguments.checkpoint, ["--threads", "1", "--no-standby", *arguments.serve])
    return ServiceProcess(["taskset", "--cpu-list", str(cores[index % len(cores)]), *command], port)


@contextmanager
def deployed(
    arguments: argparse.Namespace, spec: WorkloadSpec, policy: str, num_replicas: int = 2
) -> Iterator[tuple[list[ServiceProcess], ServiceProcess, RetryingClient, Workload]]:
    """Run replicas and a router in the `with` block. Yield them, a client of the router, and a workload."""
    show(f"{num_replicas} replicas, {policy}")
    with ExitStack() as stack:
        replicas = [stack.enter_context(start_replica(arguments, index)) for index in range(num_replicas)]
        for replica in replicas:
            replica.wait_first_token()
        model, workload = discover(replicas[0].target, spec)
        options = ["--policy", policy, "--worker-urls", *(replica.target.url for replica in replicas)]
        router = stack.enter_context(ServiceProcess([*shlex.split(arguments.router), *options]))
        router.wait_first_token(model)
        client = RetryingClient(router.target, model)
        yield replicas, router, client, workload
        client.close()


def prompt_tokens(replicas: Sequence[ServiceProcess]) -> tuple[float, float]:
    """Return the prompt tokens that replicas processed, and how many of these they found in the prefix cache."""
    pages = [scrape(replica.target) for replica in replicas]
    all_tokens, cached = (f"llm_prompt_tokens_{name}" for name in ("total", "cached_total"))
    return sum(page[all_tokens] for page in pages), sum(page.get(cached, 0.0) for page in pages)


def summary(label: str, run: LoadRun, client: RetryingClient) -> dict[str, Any]:
    """Return the figures of a load on a router that all loads have."""
    names = ("completed", "failed", "shed", "failures", "request_throughput", "mean_ttft_ms", "p99_ttft_ms")
    figures = summarize(run, label=label, slo=Slo())
    return {"label": label, **{name: figures[name] for name in names}, "retried": dict(client.retried)}


def measure_hits(arguments: argparse.Namespace, policy: str, num_replicas: int) -> dict[str, Any]:
    """Measure the share of prompt tokens in the replicas' prefix caches, and the CPU time of a request."""
    with deployed(arguments, mixed(arguments), policy, num_replicas) as (replicas, router, client, workload):
        requests = itertools.islice(traffic(workload), arguments.requests)
        parts = router.processes(), [process for replica in replicas for process in replica.processes()]
        before = [cpu_seconds(processes) for processes in parts]
        run = run_closed(client, requests, num_streams=arguments.streams)
        costs = [1e3 * (cpu_seconds(now) - then) / arguments.requests for now, then in zip(parts, before, strict=True)]
        tokens, cached = prompt_tokens(replicas)
        shares = [round(prompt_tokens([replica])[0] / tokens, 3) for replica in replicas]
    return summary(f"{num_replicas} replicas, {policy}", run, client) | {
        "hit_share": cached / tokens,
        "share_of_each_replica": shares,
        "router_cpu_ms_per_request": costs[0],
        "replica_cpu_ms_per_request": costs[1],
    }


def measure_failures(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a load while one replica is killed and started again, and then the other is drained."""
    with deployed(arguments, mixed(arguments), "cache_aware") as ((killed, drained), _, client, workload):
        is_over, endless = gevent.event.Event(), traffic(workload)
        requests = itertools.takewhile(lambda _: not is_over.is_set(), endless)
        load = gevent.spawn(run_closed, client, requests, num_streams=arguments.streams)
        gevent.sleep(arguments.settle_seconds)
        for process in killed.processes():
            process.kill()
        gevent.sleep(arguments.settle_seconds)
        with start_replica(arguments, 0, killed.target.port) as again:
            again.wait_first_token()
            began, first = time.perf_counter(), prompt_tokens([again])
            with gevent.Timeout(
                60, MeasurementFailed("the router sends nothing to the replica that was started again")
            ):
                while prompt_tokens([again]) == first:
                    gevent.sleep(0.1)
            back_seconds = time.perf_counter() - began
            drained.processes()[0].terminate()
            gevent.sleep(arguments.settle_seconds)
            if drained.processes()[1:]:
                raise MeasurementFailed("the drained replica does not end; choose more --settle-seconds")
            is_over.set()
            run = load.get()
    return summary("killed and drained", run, client) | {"router_sends_again_after_seconds": back_seconds}


def steady_state(
    arguments: argparse.Namespace,
    clients: Sequence[CompletionClient],
    requests: Iterator[LoadRequest],
    replicas: Sequence[ServiceProcess],
    router: ServiceProcess,
) -> dict[str, Any]:
    """Measure the tokens per second and the busy cores of each part, in the middle of a load.

    The load begins before and ends after the measurement, so that no replica is idle in it.
    """
    parts = [replica.processes() for replica in replicas] + [router.processes()]

    def reading() -> list[float]:
        tokens = [scrape(replica.target)["llm_generation_tokens_total"] for replica in replicas]
        return [time.perf_counter(), *tokens, *map(cpu_seconds, parts), time.process_time()]

    is_over = gevent.event.Event()
    taken = itertools.takewhile(lambda _: not is_over.is_set(), requests)
    loads = [gevent.spawn(run_closed, client, taken, num_streams=arguments.streams) for client in clients]
    gevent.sleep(arguments.settle_seconds)
    foreign, before = ForeignWork(), reading()
    gevent.sleep(arguments.seconds)
    seconds, *grown = (now - then for now, then in zip(reading(), before, strict=True))
    cores_of_others = foreign.cores()
    is_over.set()
    for load in loads:
        check_success(load.get().outcomes)
    rates, split = [round(number / seconds, 4) for number in grown], len(replicas)
    cores = {
        "replicas": rates[split:-2],
        "router": rates[-2],
        "clients": rates[-1],
        "others": round(cores_of_others, 2),
    }
    return {"tokens_per_second": rates[:split], "cores": cores}


def measure_throughput(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the output tokens per second of one replica, of two, and of two behind the router, in alternation.

    Each replica has `--streams` clients. They share the cores with the replicas, as the router does.
    """
    spec = WorkloadSpec(prompt_tokens=32, output_tokens=_LONG_TOKENS, whole_share=1.0)
    with deployed(arguments, spec, "round_robin") as (replicas, router, client, workload):
        requests = map(workload.request, itertools.count())
        direct = [CompletionClient(replica.target) for replica in replicas]
        cases = {"one": direct[:1], "two": direct, "routed": [client, client]}
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
        for name, clients in list(cases.items()) * arguments.repeats:
            measured[name].append(steady_state(arguments, clients, requests, replicas, router))
        for each in direct:
            each.close()
    rates = {name: [sum(each["tokens_per_second"]) for each in found] for name, found in measured.items()}
    return {
        "ratio": ratio_spread(rates["routed"], rates["one"]),
        "ratio_without_router": ratio_spread(rates["two"], rates["one"]),
        "cases": measured,
    }


def mixed(arguments: argparse.Namespace) -> WorkloadSpec:
    """Return the workload of half of the traffic: short and long texts, and texts with one of four prefixes."""
    kind, output_tokens = WorkloadKind.MIXED, arguments.output_tokens
    return WorkloadSpec(kind=kind, output_tokens=output_tokens, whole_share=0.25, seed=arguments.seed)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the parts of `--parts`: hits by policy, failures, throughput."""
    parts: dict[str, Callable[[], Any]] = {
        "hits": lambda: [measure_hits(arguments, *case) for case in _CASES],
        "failures": partial(measure_failures, arguments),
        "throughput": partial(measure_throughput, arguments),
    }
    return {"kind": "replicas", **{name: parts[name]() for name in arguments.parts}}


_OPTIONS = {
    "checkpoint": (Path, "checkpoint directory"),
    "router": ("vllm-router", "command of the router"),
    "parts": (["hits", "failures", "throughput"], "parts to measure"),
    "requests": (600, "requests of a load for hits"),
    "streams": (8, "concurrent requests; for throughput, of each replica"),
    "seconds": (10.0, "seconds of a measurement of throughput"),
    "output-tokens": (32, "number of tokens in a completion, about"),
    "settle-seconds": (10.0, "seconds of load before, between and after failures, and before throughput"),
    "repeats": (5, "measurements of throughput, of each case"),
    "seed": (0, "seed of the requests"),
}
main = partial(run_program, "loadtest.scenarios.bench_replicas", __doc__, _OPTIONS, measure)


if __name__ == "__main__":
    raise SystemExit(main())
