"""Many concurrent clients, of which half disconnect, and CPU time and memory of an idle service."""

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.process import PATIENCE_SECONDS, Service, serving_anew, wait_until

pytestmark = pytest.mark.slow

NUM_STREAMS = 64
NUM_CLIENTS = 300
# Limit of voluntary context switches per second of an idle process, over all its threads.
_MOST_PAUSES_A_SECOND = 60


@pytest.fixture(scope="module")
def crowded(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Start a service that runs 8 sequences at once, so that most of the 64 streams are queued."""
    flags = ("--max-num-running", "8", "--max-batched-tokens", "64", "--kv-cache-memory", "3")
    with serving_anew(
        long_checkpoint, tmp_path_factory.mktemp("crowd"), *flags, program="tests.e2e.checked"
    ) as service:
        yield service
        assert "Traceback" not in service.log.read_text(), "the engine's invariants hold whenever it is idle"


def request(number: int) -> dict[str, Any]:
    """Return a request whose length and seed depend on the number. A third of the requests share a prefix."""
    prompt = "the cat and the hat " * (1 + number % 5) if number % 3 == 0 else f"once {number}"
    return {"prompt": prompt, "max_tokens": 60 + number, "seed": number, "ignore_eos": True}


async def stream(client: httpx.AsyncClient, service: Service, number: int, leave_after: int | None) -> str | None:
    """Return the text of a stream; None if the client disconnected after `leave_after` events, before the end."""
    body = {**request(number), "stream": True, **({} if leave_after is None else {"max_tokens": 4000})}
    text, count = "", 0
    async with client.stream("POST", service.url + "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                count += 1
                if leave_after is not None and count >= leave_after:
                    return None
    raise AssertionError(f"stream {number} ended without [DONE]")


def is_whole(service: Service) -> bool:
    """Return whether no sequence runs or waits and no KV-cache block is in use."""
    names = ("llm_num_requests_running", "llm_num_requests_waiting", "llm_kv_cache_usage_perc")
    return all(service.metric(name) == 0 for name in names)


def test_disconnects_of_half_of_64_streams_do_not_change_the_other_streams(crowded: Service) -> None:
    choose = random.Random(0)
    leavers = {n: choose.randint(1, 40) for n in choose.sample(range(NUM_STREAMS), NUM_STREAMS // 2)}

    async def crowd() -> list[str | None]:
        limits = httpx.Limits(max_connections=NUM_STREAMS)
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, limits=limits) as client:
            tasks = [stream(client, crowded, n, leavers.get(n)) for n in range(NUM_STREAMS)]
            return list(await asyncio.gather(*tasks))

    texts = asyncio.run(crowd())
    assert [n for n, text in enumerate(texts) if text is None] == sorted(leavers)
    wait_until(lambda: is_whole(crowded), what="all KV-cache blocks to be free")
    assert crowded.metric("llm_requests_cancelled_total") == len(leavers)
    for number in range(NUM_STREAMS):
        if number not in leavers:
            assert texts[number] == crowded.text(**request(number)), f"request {number} alone"
    assert "Traceback" not in crowded.log.read_text()


def test_300_clients_at_once_that_never_retry_are_all_served(crowded: Service) -> None:
    """The worker is suspended until all requests wait, because a fast worker would serve some of them before."""

    async def crowd() -> list[int]:
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, limits=limits) as client:
            bodies = ({"prompt": f"once {number}", "max_tokens": 4} for number in range(NUM_CLIENTS))
            calls = [client.post(crowded.url + "/v1/completions", json=body) for body in bodies]
            responses = asyncio.gather(*calls)
            await asyncio.to_thread(wait_until, has_decided, what="all requests to be admitted or rejected")
            worker.resume()
            return [response.status_code for response in await responses]

    def has_decided() -> bool:
        num_rejected = crowded.metric("llm_admission_rejections_total")
        return crowded.metric("llm_api_requests") + num_rejected == NUM_CLIENTS

    worker = crowded.worker
    worker.suspend()
    try:
        assert asyncio.run(crowd()) == [200] * NUM_CLIENTS
    finally:
        worker.resume()
    wait_until(lambda: is_whole(crowded), what="all KV-cache blocks to be free")


def test_a_disconnect_before_the_response_cancels_the_request(crowded: Service) -> None:
    before = crowded.metric("llm_requests_cancelled_total")
    with crowded.asking(prompt="once", max_tokens=8000, ignore_eos=True):
        wait_until(lambda: crowded.metric("llm_num_requests_running") == 1, what="the request to run")
    wait_until(lambda: crowded.metric("llm_requests_cancelled_total") == before + 1, what="the cancellation")
    wait_until(lambda: is_whole(crowded), what="its blocks to be free")
    assert crowded.metric("llm_wasted_tokens_total", reason="cancelled") > 0


def test_an_idle_service_waits_and_does_not_poll(crowded: Service) -> None:
    """Compare voluntary context switches with a limit: their number does not depend on the machine.

    A process that spins has no voluntary context switch, so its CPU time is compared, too.
    """
    crowded.text("once", max_tokens=2)
    processes = {"worker": crowded.worker, "api": crowded.api}
    begun, before = time.monotonic(), {name: _pauses(process) for name, process in processes.items()}
    processes["worker"].cpu_percent()  # starts the measurement
    percent = {"api": processes["api"].cpu_percent(interval=2.0), "worker": processes["worker"].cpu_percent()}
    for name, process in processes.items():
        assert (_pauses(process) - before[name]) / (time.monotonic() - begun) < _MOST_PAUSES_A_SECOND, name
        assert percent[name] < 50, f"the {name} spins"


def _pauses(process: psutil.Process) -> int:
    """Return the number of voluntary context switches of a process, over all its threads."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/status")
    counts = [re.search(r"^voluntary_ctxt_switches:\s+(\d+)", task.read_text(), re.M) for task in tasks]
    return sum(int(count[1]) for count in counts if count is not None)


def test_the_api_process_is_small_and_has_no_torch(crowded: Service) -> None:
    api = crowded.api
    mapped = {mapping.path for mapping in api.memory_maps()}
    assert not any("torch" in path for path in mapped)
    assert any("torch" in mapping.path for mapping in crowded.worker.memory_maps()), "the check itself works"
    assert api.memory_info().rss < 150 * 2**20
