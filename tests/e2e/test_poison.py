"""Poison requests, which kill the worker, and deaths of the standby worker."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.poisoned import KILLS
from tests.e2e.process import START_SECONDS, Service, alive, serving, wait_until

pytestmark = pytest.mark.slow

GOOD = {"prompt": "once", "max_tokens": 1000, "ignore_eos": True, "temperature": 1.0, "seed": 3}


def test_a_poison_request_ends_with_an_error_and_the_other_requests_complete(
    long_checkpoint: Path, tmp_path: Path
) -> None:
    with serving(long_checkpoint, tmp_path, "--standby", program="tests.e2e.poisoned") as poisoned:
        expected = poisoned.text(**GOOD)
        with ThreadPoolExecutor(8) as threads:
            good = [threads.submit(poisoned.text, **GOOD) for _ in range(4)]
            answer = httpx.post(poisoned.url + "/v1/completions", json={"prompt": KILLS}, timeout=START_SECONDS)
            assert [one.result() for one in good] == [expected] * 4
        assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
        assert answer.json()["error"]["message"] == "the worker died repeatedly on this request"
        assert poisoned.metric("llm_worker_restarts_total") >= 3
        assert poisoned.metric("llm_requests_replayed_total", outcome="gave_up") == 1
        assert poisoned.text(**GOOD) == expected


def test_a_dead_or_used_standby_is_replaced(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with serving(tiny_checkpoint, tmp_path, "--standby") as service:
        wait_until(has_standby(service), what="a standby")
        worker, first = service.worker, service.standby
        end(first)
        wait_until(has_standby(service, other_than=first), what="another standby")
        assert service.worker == worker
        second = service.standby
        end(worker)
        wait_until(has_standby(service, other_than=second), what="a third standby")
        assert service.worker == second
        assert service.text("a", max_tokens=2, temperature=0)


def end(process: psutil.Process) -> None:
    process.kill()
    wait_until(lambda: not alive([process]), what="the end of the process")


def has_standby(service: Service, other_than: psutil.Process | None = None) -> Callable[[], bool]:
    def is_there() -> bool:
        names = {child: child.name() for child in service.children}
        return any(name == "kvasir-standby" and child != other_than for child, name in names.items())

    return is_there
