"""Worker that hangs: the state that the service reports, and the request limits that hold meanwhile.

The test stops the worker process, and main may not kill it. Every response that is asserted before the test resumes the
worker is therefore sent during the hang, on a slow machine, too.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.metrics.definitions import EngineState
from tests.e2e.process import START_SECONDS, Service, serving, wait_until

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"prompt": "once", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@contextmanager
def stopped(worker: psutil.Process) -> Iterator[None]:
    """Stop the worker process while the block runs."""
    worker.suspend()
    try:
        wait_until(lambda: worker.status() == psutil.STATUS_STOPPED, what="the worker to stop")
        yield
        assert worker.status() == psutil.STATUS_STOPPED, "the worker resumed before the end of the assertions"
    finally:
        worker.resume()


def states(service: Service) -> dict[str, float]:
    return {state: service.metric("llm_engine_state", state=state) for state in EngineState}


def only(state: EngineState) -> dict[str, float]:
    return {other: float(other is state) for other in EngineState}


def test_queue_limits_hold_and_ready_reports_stalled_during_a_hang(long_checkpoint: Path, tmp_path: Path) -> None:
    limits = ("--max-num-running", "1", "--max-waiting-requests", "1", "--max-queue-seconds", "3600")
    with (
        serving(long_checkpoint, tmp_path, "--hang-seconds", "0", *limits) as service,
        ThreadPoolExecutor(1) as threads,
    ):
        assert states(service) == only(EngineState.READY)
        expected = service.text(**LONG)
        asked = {**LONG, "stream": True}
        with httpx.stream("POST", service.url + "/v1/completions", json=asked, timeout=START_SECONDS) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
            begun = text_of(next(lines))
            with stopped(service.worker):
                patient = threads.submit(service.post, prompt="a", max_tokens=2, timeout=3600)
                wait_until(lambda: service.metric("llm_api_requests") == 2, what="the queue to be full")
                full = service.post(prompt="a", max_tokens=2)
                assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
                assert int(full.headers["retry-after"]) >= 1
                wait_until(lambda: service.get("/ready").json()["state"] == "stalled", what="the hang to be noticed")
                assert service.get("/ready").status_code == 503
                assert states(service) == only(EngineState.STALLED)
                assert not patient.done(), "the queued request timed out too early"
            assert begun + "".join(text_of(line) for line in lines if line != "[DONE]") == expected
        assert patient.result().status_code == 200
        wait_until(service.is_ready, what="the service to be ready again")
        assert states(service) == only(EngineState.READY)
        assert service.metric("llm_worker_restarts_total") == 0


def test_a_request_sent_during_a_hang_times_out(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with serving(tiny_checkpoint, tmp_path, "--hang-seconds", "0", "--max-queue-seconds", "3") as service:
        with stopped(service.worker), ThreadPoolExecutor(5) as threads:
            early = threads.submit(service.post, prompt="a", timeout=1)
            late = [
                threads.submit(service.post, prompt="a"),
                threads.submit(service.post, "/v1/embeddings", input="a"),
                threads.submit(service.post, prompt="a", stream=True),
                threads.submit(service.post, "/inspect/attention", prompt="a", layer=0),
            ]
            check_late(early.result(), seconds=1)
            for response in late:
                check_late(response.result())
        assert service.text("a", max_tokens=2) is not None


def text_of(line: str) -> str:
    return str(json.loads(line)["choices"][0]["text"])


def check_late(response: httpx.Response, seconds: int = 3) -> None:
    assert response.status_code == 408, response.text
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("queue_timeout", "timeout_error")
    assert error["message"] == f"the request did not start within its timeout of {seconds} s; try again later"
    assert int(response.headers["retry-after"]) >= 1
    assert response.headers["x-should-retry"] == "true"
