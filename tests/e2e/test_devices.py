"""Several workers behind one API process: responses of one worker, prefix affinity, deaths under load, and drain."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.worker.cache_event_publisher import address_of
from tests.e2e.process import Service, alive, serving, wait_until
from tests.e2e.test_poison import has_standby
from tests.service.streams import events, joined
from tests.service.worker.test_cache_events import Router, chain

pytestmark = pytest.mark.slow
LONG = {"max_tokens": 200, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of the first worker's KV-cache events."""
    return f"ipc://{tmp_path_factory.mktemp('events')}/kv"


@pytest.fixture(scope="module")
def pair(long_checkpoint: Path, endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Start a service with two workers on a CPU each, which check the engine's invariants."""
    flags = ("--devices", "2", "--standby", "--kv-events-endpoint", endpoint)
    with serving(long_checkpoint, tmp_path_factory.mktemp("pair"), *flags, program="tests.e2e.checked") as running:
        yield running


def workers(service: Service) -> list[psutil.Process]:
    """Return the worker processes, by the first CPU that each may use."""
    found = [child for child in service.children if child.name() == "kvasir-worker"]
    return sorted(found, key=lambda process: min(process.cpu_affinity()))


def busy_seconds(service: Service) -> list[float]:
    return [service.metric("llm_worker_busy_seconds_total", worker=str(index)) for index in (0, 1)]


def crowd() -> list[dict[str, Any]]:
    """Return 12 different requests: greedy and sampled, streamed and whole, of one and of two samples."""
    sampling: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 5}, {"seed": 6, "n": 2}]
    return [
        {"prompt": f"{number} once the a in", "stream": number % 2 == 0, **sampling[number % 3], **LONG}
        for number in range(12)
    ]


def ask(service: Service, body: dict[str, Any]) -> Any:
    response = service.post(**body)
    assert response.status_code == 200, response.text
    return joined(events(response.text))["choices"] if body["stream"] else response.json()["choices"]


@pytest.fixture(scope="module")
def expected(pair: Service) -> list[Any]:
    """Return the responses to the requests one after the other, each computed by one worker alone."""
    return [ask(pair, body) for body in crowd()]


def test_each_worker_has_its_own_cpus(pair: Service) -> None:
    first, second = (set(process.cpu_affinity()) for process in workers(pair))
    assert first.isdisjoint(second)
    assert first | second <= os.sched_getaffinity(0)
    ready = pair.get("/ready").json()
    assert (ready["state"], ready["devices"], ready["devices_ready"]) == ("ready", 2, 2)
    assert "devices                    2 (device, threads and KV-cache" in pair.printed.read_text()


def test_two_workers_at_once_give_the_responses_of_one(pair: Service, expected: list[Any]) -> None:
    before = busy_seconds(pair)
    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(lambda body: ask(pair, body), crowd())) == expected
    assert all(after > earlier for after, earlier in zip(busy_seconds(pair), before, strict=True))


def test_a_conversation_stays_with_the_worker_that_holds_its_prefix(pair: Service) -> None:
    """Three turns of four conversations, one after the other: first turns alternate, later turns find all before."""
    cached: list[list[int]] = []
    for turn in range(3):
        cached.append([])
        for conversation in range(4):
            ids = [50 + conversation, *range(100, 131), *range(131, 131 + 16 * turn), 7]
            usage = pair.complete(ids, max_tokens=1)["usage"]
            cached[-1].append(int(usage["prompt_tokens_details"]["cached_tokens"]))
    assert cached == [[0] * 4, [32] * 4, [48] * 4]
    hits = pair.metric("llm_prefix_cache_hits_total"), pair.metric("vllm:prefix_cache_hits_total")
    assert hits[0] == hits[1] >= 4 * (32 + 48)


def test_each_worker_publishes_the_changes_of_its_own_cache(pair: Service, endpoint: str) -> None:
    routers = [Router(address_of(endpoint, rank), rank=rank) for rank in (0, 1)]
    prompts = ([first, *range(60, 92)] for first in range(10, 50))

    def num_learned() -> int:
        """Complete a new prompt. Return how many workers' routers learn its two full blocks."""
        blocks = chain(prompt := next(prompts))
        pair.complete(prompt, max_tokens=1)
        while any(router.read(200) for router in routers):
            pass
        return sum(set(blocks) <= router.blocks.keys() for router in routers)

    wait_until(lambda: num_learned() == 1 and all(router.blocks for router in routers), what="events of both workers")
    assert [num_learned() for _ in range(4)] == [1] * 4
    for router in routers:
        router.close()


def test_the_other_worker_serves_while_a_dead_worker_is_replaced(pair: Service, expected: list[Any]) -> None:
    """The standby is stopped, so that the death lasts until the test has asked the other worker."""
    wait_until(has_standby(pair), what="a standby")
    standby, (victim, _), generated = pair.standby, workers(pair), pair.metric("llm_generation_tokens_total")
    with ThreadPoolExecutor(13) as threads:
        asked = [threads.submit(ask, pair, body) for body in crowd()]
        wait_until(lambda: pair.metric("llm_generation_tokens_total") > generated + 300, what="300 tokens")
        standby.suspend()
        victim.send_signal(signal.SIGKILL)
        wait_until(lambda: not alive([victim]), what="the worker's end")
        wait_until(lambda: pair.get("/ready").json()["devices_ready"] == 1, what="the death to be noticed")
        assert pair.is_ready()
        assert pair.metric("llm_worker_ready") == 1
        for number in range(4):
            assert ask(pair, crowd()[number]) == expected[number]
        assert not all(future.done() for future in asked)
        standby.resume()
        assert [future.result() for future in asked] == expected
    assert pair.get("/ready").json()["devices_ready"] == 2
    assert pair.metric("llm_worker_restarts_total", reason="signal") == 1
    assert standby in workers(pair)
    wait_until(lambda: pair.metric("llm_num_requests_running") == 0, what="idle engines")


def test_a_drain_waits_for_both_workers(pair: Service, expected: list[Any]) -> None:
    before = busy_seconds(pair)
    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(ask, pair, body) for body in crowd()]
        wait_until(
            lambda: all(after > earlier for after, earlier in zip(busy_seconds(pair), before, strict=True)),
            what="steps of both workers",
        )
        wait_until(
            lambda: sum(future.done() for future in asked) + pair.metric("llm_api_requests") >= 12, what="all requests"
        )
        assert pair.stop() == 0
        assert [future.result() for future in asked] == expected
