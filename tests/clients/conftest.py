"""Services for all client tests: one with a model of this repository, and one whose queue is full."""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest

from tests.clients.environments import CHECKPOINT, KEY, MODEL
from tests.e2e.process import Service, serving_anew


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving_anew(CHECKPOINT, tmp_path_factory.mktemp("service"), "--model-name", MODEL) as running:
        yield running


@pytest.fixture(scope="session")
def full(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Service that requires an API key and rejects further requests: one runs, one waits, the worker is suspended."""
    directory = tmp_path_factory.mktemp("full")
    keys = directory / "keys"
    keys.write_text(f"tests: {KEY}\n")
    keys.chmod(0o600)
    flags = (
        "--model-name",
        MODEL,
        "--max-num-running",
        "1",
        "--max-waiting-requests",
        "1",
        "--hang-seconds",
        "0",
        "--api-keys-file",
        str(keys),
        "--hang-seconds",  # the worker stays suspended until the last test
        "0",
    )
    with serving_anew(tiny_checkpoint, directory, *flags) as running, ThreadPoolExecutor(3) as pool:

        def ask() -> int:
            body, headers = {"prompt": "a", "max_tokens": 1}, {"authorization": f"Bearer {KEY}"}
            return httpx.post(running.url + "/v1/completions", json=body, headers=headers, timeout=None).status_code

        worker = running.worker
        worker.suspend()
        try:
            asked = [pool.submit(ask) for _ in range(3)]
            (refused,), admitted = wait(asked, timeout=60, return_when=FIRST_COMPLETED)
            assert refused.result() == 429
            yield running
        finally:
            worker.resume()
        assert [answer.result() for answer in admitted] == [200, 200]
