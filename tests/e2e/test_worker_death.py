"""kill -9 of the worker under a crowd of mixed requests: each ends as it would have ended without."""

import itertools
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.process import Service, serving, wait_until
from tests.service.streams import assert_close, events, joined

pytestmark = pytest.mark.slow

_TEXT, _CHAT = "/v1/completions", "/v1/chat/completions"
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 60, "maxLength": 120}, "count": {"type": "integer"}},
    "required": ["name", "count"],
}
_GREEDY = {"temperature": 0}
_DRAWN = {"temperature": 1.0, "top_p": 0.95}
# A path, and what is asked for there. Each with eight prompts and seeds; every other one is a stream.
KINDS: list[tuple[str, dict[str, Any]]] = [
    (_TEXT, {**_GREEDY, "ignore_eos": True}),
    (_TEXT, {**_DRAWN, "ignore_eos": True, "stop": ["never to be seen"], "return_token_ids": True}),
    (_TEXT, {**_DRAWN, "n": 3, "max_tokens": 60}),
    (_TEXT, {**_DRAWN, "ignore_eos": True, "echo": True, "logprobs": 2, "prompt_logprobs": 1}),
    (
        _TEXT,
        {**_GREEDY, "ignore_eos": True, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {"7": 3}},
    ),
    (_CHAT, {**_DRAWN, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}}),
    (_CHAT, {**_DRAWN, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}),
    (_TEXT, {**_DRAWN, "best_of": 3, "n": 2, "max_tokens": 60, "stream": False}),
]


def crowd() -> list[tuple[str, dict[str, Any]]]:
    """64 requests, no two alike."""
    asked = []
    for (path, fields), number in itertools.product(KINDS, range(8)):
        prompt = "once the a in " * (1 + number % 3) + str(number)
        subject = {"prompt": prompt} if path == _TEXT else {"messages": [{"role": "user", "content": prompt}]}
        asked.append((path, {"max_tokens": 200, "seed": number, "stream": number % 2 == 0, **subject, **fields}))
    return asked


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """What of an answer has to be the same in every run: not its id, its times, and what the cache had."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if path == "/v1/embeddings":
        return response.json()["data"]
    if path == "/inspect/attention":
        return response.json()["weights"]
    return joined(events(response.text))["choices"] if body.get("stream") else response.json()["choices"]


class Short(threading.Thread):
    """A client that asks the same short question again and again; `answers` are what it was told."""

    def __init__(self, client: httpx.Client, path: str, body: dict[str, Any], is_over: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self._ask, self._is_over = lambda: ask(client, path, body), is_over
        self.answers = [self._ask()]

    def run(self) -> None:
        while not self._is_over():
            self.answers.append(self._ask())


def kill(worker: psutil.Process) -> None:
    worker.send_signal(signal.SIGKILL)
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, what="the worker's end")


@pytest.fixture(scope="module")
def reference(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A service, a client, and what the crowd is told where nothing happens."""
    with (
        serving(long_checkpoint, tmp_path_factory.mktemp("death"), "--max-num-running", "96") as service,
        httpx.Client(base_url=service.url, timeout=300, limits=httpx.Limits(max_connections=100)) as client,
    ):
        yield service, client, run_crowd(client)


def run_crowd(client: httpx.Client) -> list[Any]:
    with ThreadPoolExecutor(64) as threads:
        return list(threads.map(lambda asked: ask(client, *asked), crowd()))


@pytest.mark.parametrize("num_deaths", [1, 2])
def test_every_request_ends_as_if_nothing_had_happened(
    reference: tuple[Service, httpx.Client, list[Any]], num_deaths: int
) -> None:
    service, client, expected = reference
    restarts = service.metric("llm_worker_restarts_total")
    generated = service.metric("llm_generation_tokens_total")
    over = threading.Event()
    shorts = [
        Short(client, "/v1/embeddings", {"input": ["once", "the a"]}, over.is_set),
        Short(client, "/inspect/attention", {"prompt": "once the a", "layer": 1}, over.is_set),
    ]
    told: list[list[Any]] = []
    running = threading.Thread(target=lambda: told.append(run_crowd(client)), daemon=True)
    for thread in (*shorts, running):
        thread.start()
    wait_until(lambda: service.metric("llm_generation_tokens_total") > generated + 2000, what="the crowd to be served")
    kill(service.worker)
    if num_deaths == 2:
        wait_until(lambda: service.metric("llm_worker_restarts_total") > restarts, what="the death to be noticed")
        wait_until(service.is_ready, what="the next worker")
        kill(service.worker)
    running.join(300)
    over.set()
    for short in shorts:
        short.join(60)
    (answers,) = told
    for answer, wanted in zip(answers, expected, strict=True):
        assert_close(answer, wanted)
    for short in shorts:
        for answer in short.answers:
            assert_close(answer, short.answers[0])
    assert service.metric("llm_worker_restarts_total") == restarts + num_deaths
    assert service.metric("llm_requests_replayed_total", outcome="gave_up") == 0
    wait_until(lambda: service.metric("llm_num_requests_running") == 0, what="the pool to be empty")
