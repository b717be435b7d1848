"""Many clients at once, rude ones among them; and what the service costs when there is nobody."""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.process import Service, serving, wait_until

pytestmark = pytest.mark.slow

NUM_STREAMS = 64


@pytest.fixture(scope="module")
def crowded(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A small engine: most of the 64 wait for one of 8 places."""
    flags = ("--max-num-running", "8", "--max-batched-tokens", "64", "--kv-cache-memory", "3")
    with serving(long_checkpoint, tmp_path_factory.mktemp("crowd"), *flags) as service:
        yield service


@pytest.fixture(scope="module")
def narrow(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One runs, one waits."""
    flags = ("--max-num-running", "1", "--max-waiting-requests", "1", "--kv-cache-memory", "3")
    with serving(long_checkpoint, tmp_path_factory.mktemp("narrow"), *flags) as service:
        yield service


def request(number: int) -> dict[str, Any]:
    """Different lengths and seeds; a third shares a prefix."""
    prompt = "the cat and the hat " * (1 + number % 5) if number % 3 == 0 else f"once {number}"
    return {"prompt": prompt, "max_tokens": 60 + number, "seed": number, "ignore_eos": True}


async def stream(client: httpx.AsyncClient, service: Service, number: int, leave_after: int | None) -> str | None:
    """The stream's text, or None when the client left after so many events."""
    body = {**request(number), "stream": True}
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
    """Nothing runs, waits or holds KV blocks."""
    names = ("llm_num_requests_running", "llm_num_requests_waiting", "llm_kv_cache_usage_perc")
    return all(service.metric(name) == 0 for name in names)


def test_half_of_64_streams_leave_and_the_others_never_notice(crowded: Service) -> None:
    choose = random.Random(0)
    leavers = {n: choose.randint(1, 40) for n in choose.sample(range(NUM_STREAMS), NUM_STREAMS // 2)}

    async def crowd() -> list[str | None]:
        limits = httpx.Limits(max_connections=NUM_STREAMS)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            tasks = [stream(client, crowded, n, leavers.get(n)) for n in range(NUM_STREAMS)]
            return list(await asyncio.gather(*tasks))

    texts = asyncio.run(crowd())
    assert [n for n, text in enumerate(texts) if text is None] == sorted(leavers)
    wait_until(lambda: is_whole(crowded), what="the pool to be whole")
    assert crowded.metric("llm_requests_cancelled_total") >= 1
    for number in range(NUM_STREAMS):
        if number not in leavers:
            assert texts[number] == crowded.text(**request(number)), f"request {number} alone"
    assert "Traceback" not in crowded.log.read_text()


def test_a_client_that_leaves_before_its_body_is_cancelled_too(crowded: Service) -> None:
    before = crowded.metric("llm_requests_cancelled_total")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            crowded.url + "/v1/completions",
            json={"prompt": "once", "max_tokens": 8000, "ignore_eos": True},
            timeout=0.3,
        )
    wait_until(lambda: crowded.metric("llm_requests_cancelled_total") == before + 1, what="the cancellation")
    wait_until(lambda: is_whole(crowded), what="its blocks to be free")
    assert crowded.metric("llm_wasted_tokens_total", reason="cancelled") > 0


def test_a_full_service_says_when_to_come_back(narrow: Service) -> None:
    body = {"prompt": "once", "max_tokens": 2500, "ignore_eos": True}
    with ThreadPoolExecutor() as clients:
        admitted = [clients.submit(narrow.post, **body) for _ in range(2)]
        wait_until(lambda: narrow.metric("llm_num_requests_waiting") == 1, what="one to run and one to wait")
        refused = narrow.post(prompt="once")
        assert [future.result().status_code for future in admitted] == [200, 200]
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    assert int(refused.headers["retry-after-ms"]) >= 1
    assert refused.headers["x-should-retry"] == "true"
    assert narrow.metric("llm_admission_rejections_total", reason="queue_full") >= 1
    assert narrow.text("once", max_tokens=1) is not None


def test_an_idle_service_costs_nothing(narrow: Service) -> None:
    narrow.text("once", max_tokens=2)
    processes = {"worker": narrow.worker, "api": narrow.api}

    def cpu_seconds() -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}

    before, begun = cpu_seconds(), time.monotonic()
    while time.monotonic() < begun + 3.0:
        time.sleep(0.5)  # nobody asks for anything: that is what is measured
    used = {name: seconds - before[name] for name, seconds in cpu_seconds().items()}
    elapsed = time.monotonic() - begun
    assert used["worker"] / elapsed < 0.03
    assert used["api"] / elapsed < 0.05


def test_the_api_process_is_small_and_has_no_torch(narrow: Service) -> None:
    api = narrow.api
    mapped = {mapping.path for mapping in api.memory_maps()}
    assert not any("torch" in path for path in mapped)
    assert any("torch" in mapping.path for mapping in narrow.worker.memory_maps()), "the check itself works"
    assert api.memory_info().rss < 150 * 2**20
