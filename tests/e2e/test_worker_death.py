"""SIGKILL of the worker during many different requests, which then complete with unchanged responses.

Before it, the processes and threads of the server are compared with the table in docs/design.md, section 1.
"""

import itertools
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.process import START_SECONDS, Service, alive, serving_anew, wait_until
from tests.e2e.test_poison import has_standby
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
# Path and body of each kind of request. Each has five prompts and seeds. Every second request is a stream.
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
    """Return 40 different requests."""
    asked = []
    for (path, fields), number in itertools.product(KINDS, range(5)):
        prompt = "once the a in " * (1 + number % 3) + str(number)
        subject = {"prompt": prompt} if path == _TEXT else {"messages": [{"role": "user", "content": prompt}]}
        asked.append((path, {"max_tokens": 200, "seed": number, "stream": number % 2 == 0, **subject, **fields}))
    return asked


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """Send a request and return the parts of the response that are equal in every run."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if path == "/v1/embeddings":
        return response.json()["data"]
    if path == "/inspect/attention":
        return response.json()["weights"]
    return joined(events(response.text))["choices"] if body.get("stream") else response.json()["choices"]


def repeat(client: httpx.Client, path: str, body: dict[str, Any], over: threading.Event) -> list[Any]:
    """Repeat a short request until `over` is set, and once more. Return all responses."""
    answers = []
    while not over.is_set():
        answers.append(ask(client, path, body))
    return [*answers, ask(client, path, body)]


def kill(worker: psutil.Process) -> None:
    worker.send_signal(signal.SIGKILL)
    wait_until(lambda: not alive([worker]), what="the worker's end")


def kill_and_probe(service: Service) -> None:
    """Kill the worker, and check /ready and /health while the standby is stopped and cannot replace the worker."""
    wait_until(has_standby(service), what="a standby")
    standby = service.standby
    standby.suspend()
    kill(service.worker)
    wait_until(lambda: service.get("/ready").status_code == 503, what="the death to be noticed")
    assert service.get("/ready").json()["state"] == "loading"
    assert service.get("/health").status_code == 200
    standby.resume()


@pytest.fixture(scope="module")
def service(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    flags = ("--standby", "--max-num-running", "96")
    with serving_anew(
        long_checkpoint, tmp_path_factory.mktemp("death"), *flags, program="tests.e2e.checked"
    ) as running:
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=100)
    with httpx.Client(base_url=service.url, timeout=START_SECONDS, limits=limits) as client:
        yield client


DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
ROW = re.compile(r"^\| `(?P<process>kvasir-\w+)` \|.*\|(?P<threads>[^|]+)\|$")
# Threads that a library starts while the standby imports keep the name which the standby has until then.
LIBRARY = "kvasir-importer"


def documented() -> dict[str, set[str]]:
    """Return the names of the threads of each process in the table."""
    section = DESIGN.read_text().partition("## 1. Processes")[2].partition("\n## ")[0]
    rows = [row for line in section.splitlines() if (row := ROW.match(line))]
    return {row["process"]: set(re.findall(r"`(kvasir-\w+)`", row["threads"])) for row in rows}


def threads_of(process: psutil.Process) -> set[str]:
    """Return the names of the threads of a process."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return {(task / "comm").read_text().strip() for task in tasks} - {LIBRARY}


def test_processes_and_threads_are_those_of_the_design_page(service: Service) -> None:
    wait_until(has_standby(service), what="the standby")
    assert service.text("once", max_tokens=2) is not None
    processes = [psutil.Process(service.process.pid), *service.children]
    assert {process.name(): threads_of(process) for process in processes} == documented()
    assert len(processes) == len(documented())
    assert processes[0].num_threads() == 1


def test_worker_deaths_change_no_response(service: Service, client: httpx.Client) -> None:
    """The standby replaces the first worker. The second worker dies before another standby is ready."""

    def generated() -> float:
        return service.metric("llm_generation_tokens_total")

    over = threading.Event()
    with ThreadPoolExecutor(len(crowd()) + 2) as threads:
        expected = list(threads.map(lambda asked: ask(client, *asked), crowd()))
        restarts, before = service.metric("llm_worker_restarts_total"), generated()
        shorts = [
            threads.submit(repeat, client, "/v1/embeddings", {"input": ["once", "the a"]}, over),
            threads.submit(repeat, client, "/inspect/attention", {"prompt": "once", "layer": 1}, over),
        ]
        try:
            told = [threads.submit(ask, client, *asked) for asked in crowd()]
            wait_until(lambda: generated() > before + 1000, what="1,000 tokens")
            kill_and_probe(service)
            wait_until(service.is_ready, what="the next worker")
            kill(service.worker)
            answers = [each.result() for each in told]
        finally:
            over.set()
        for short in shorts:
            for answer in short.result():
                assert_close(answer, short.result()[0])
    for answer, wanted in zip(answers, expected, strict=True):
        assert_close(answer, wanted)
    assert service.metric("llm_worker_restarts_total") == restarts + 2
    assert service.metric("llm_requests_replayed_total", outcome="resubmitted") >= 2
    assert service.metric("llm_requests_replayed_total", outcome="gave_up") == 0
    wait_until(lambda: service.metric("llm_num_requests_running") == 0, what="an idle engine")
