"""Requests that kill the worker, or hang it, and what becomes of the others."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.poisoned import HANGS, KILLS
from tests.e2e.process import Service, alive, serving, wait_until

pytestmark = pytest.mark.slow

GOOD = {"prompt": "once", "max_tokens": 1000, "ignore_eos": True, "temperature": 1.0, "seed": 3}


@pytest.fixture
def poisoned(long_checkpoint: Path, tmp_path: Path) -> Iterator[Service]:
    with serving(long_checkpoint, tmp_path, "--hang-seconds", "3", program="tests.e2e.poisoned") as service:
        yield service


@pytest.mark.parametrize("poison", [KILLS, HANGS], ids=["kills", "hangs"])
def test_a_poison_ends_with_an_error_of_its_own_and_takes_nobody_with_it(poisoned: Service, poison: list[int]) -> None:
    expected = poisoned.text(**GOOD)
    with ThreadPoolExecutor(8) as threads:
        good = [threads.submit(poisoned.text, **GOOD) for _ in range(4)]
        bad = threads.submit(httpx.post, poisoned.url + "/v1/completions", json={"prompt": poison}, timeout=300)
        answer = bad.result()
        assert [one.result() for one in good] == [expected] * 4
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert answer.json()["error"]["message"] == "the worker died repeatedly on this request"
    assert poisoned.metric("llm_worker_restarts_total") >= 3
    assert poisoned.metric("llm_requests_replayed_total", outcome="gave_up") == 1
    assert poisoned.text(**GOOD) == expected


def test_a_crash_loop_ends_the_service_with_a_line_and_a_failure(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with serving(tiny_checkpoint, tmp_path) as service:
        for number in range(6):
            if number:
                wait_until(service.is_ready, seconds=120, what="the next worker")
            worker = service.worker
            worker.kill()
            wait_until(lambda worker=worker: not alive([worker]), what="its end")  # type: ignore[misc]
            if number < 5:
                wait_until(
                    lambda number=number: service.metric("llm_worker_restarts_total") > number,  # type: ignore[misc]
                    what="the death to be noticed",
                )
        assert service.process.wait(30) == 1
        assert "the worker died 6 times within a minute (was killed by SIGKILL" in service.log.read_text()


@pytest.mark.parametrize("name", ["kvasir-standby", "kvasir-worker"])
def test_a_standby_is_kept(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    """Whether it dies itself, or is needed."""
    with serving(tiny_checkpoint, tmp_path) as service:
        wait_until(has_standby(service), seconds=60, what="a standby")
        before = service.standby
        victim = before if name == "kvasir-standby" else service.worker
        victim.kill()
        wait_until(lambda: not alive([victim]), what="its end")
        wait_until(has_standby(service, other_than=before), seconds=60, what="another standby")
        assert (service.worker == before) == (name == "kvasir-worker")
        assert service.text("a", max_tokens=2, temperature=0)


def has_standby(service: Service, other_than: psutil.Process | None = None) -> Callable[[], bool]:
    def look() -> bool:
        names = {child: child.name() for child in service.children}
        return any(name == "kvasir-standby" and child != other_than for child, name in names.items())

    return look


def test_without_a_queue_process_the_service_tells_its_clients_ends_and_leaves_nobody(
    long_checkpoint: Path, tmp_path: Path
) -> None:
    with serving(long_checkpoint, tmp_path) as service:
        family = service.children
        fields = {"prompt": "once", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", service.url + "/v1/completions", json=fields, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            service.queue.send_signal(signal.SIGKILL)
            *_, last = lines
        assert '"code":"draining"' in last
        assert service.process.wait(30) == 1
        wait_until(lambda: not alive(family), what="every process to end")
        assert "the queue process was killed by SIGKILL" in service.log.read_text()
