"""`/inspect/attention` on a real server: returned weights, concurrent completions, and deaths of the worker."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from model.checkpoint.loading import load_model
from model.checkpoint.manifest import read_manifest
from model.inspect.attention_weights import weights_of_layer
from model.native.native_transformer import to_native
from tests.e2e.process import Service, serving, wait_until
from tests.e2e.slow_looks import VARIABLE
from tests.model.kernel_libraries import BACKENDS

pytestmark = pytest.mark.slow
ROUTE = "/inspect/attention"
PROMPT = "once in the theatre 😀"


def test_weights_equal_those_of_the_model(service: Service, tiny_checkpoint: Path) -> None:
    body = service.post(ROUTE, prompt=PROMPT, layer=1).json()
    loaded = load_model(read_manifest(tiny_checkpoint), device="cpu", dtype=torch.float32, attention=BACKENDS["native"])
    told, wanted = (torch.tensor(body["weights"]), weights_of_layer(to_native(loaded), body["token_ids"], layer=1))
    torch.testing.assert_close(told, wanted, atol=1e-6, rtol=0)  # the route writes six decimals
    assert told.triu(1).count_nonzero() == 0
    torch.testing.assert_close(told.sum(-1), torch.ones(told.shape[:2]), atol=1e-4, rtol=0)
    assert body["token_ids"] == service.post("/tokenize", prompt=PROMPT).json()["tokens"]
    assert service.get(ROUTE).json() == {"model": "tiny", "num_layers": 2, "num_heads": 4, "max_tokens": 128}


def test_concurrent_attention_queries_do_not_change_completions(service: Service) -> None:
    fields: dict[str, Any] = {"max_tokens": 120, "seed": 3, "ignore_eos": True}
    alone = service.text(PROMPT, **fields)
    over = threading.Event()

    def look() -> set[int]:
        statuses = set()
        while not over.is_set():
            statuses.add(service.post(ROUTE, prompt="z" * 128, layer=1).status_code)
        return statuses

    with ThreadPoolExecutor(2) as threads:
        lookers = [threads.submit(look) for _ in range(2)]
        try:
            beside = [service.text(PROMPT, **fields) for _ in range(3)]
        finally:
            over.set()
    assert beside == [alone] * 3
    assert [looker.result() for looker in lookers] == [{200}] * 2


def test_a_slow_attention_query_is_answered_after_two_worker_deaths(tiny_checkpoint: Path, tmp_path: Path) -> None:
    until = tmp_path / "looks"
    began = until.with_suffix(".began")

    def computes_the_look(worker: psutil.Process) -> bool:
        return began.exists() and began.read_text() == str(worker.pid)

    def num_restarts_is(number: int) -> bool:
        return service.metric("llm_worker_restarts_total") == number

    flags = ("--hang-seconds", "0")
    variables = {VARIABLE: str(until)}
    with (
        serving(tiny_checkpoint, tmp_path, *flags, program="tests.e2e.slow_looks", **variables) as service,
        ThreadPoolExecutor(2) as threads,
    ):
        asked = threads.submit(service.post, ROUTE, prompt="a", layer=0)
        for deaths in (1, 2):
            worker = service.worker
            wait_until(partial(computes_the_look, worker), what="the attention query to begin")
            worker.kill()
            wait_until(partial(num_restarts_is, deaths), what="the death to be noticed")
            wait_until(service.is_ready, what="the next worker")
        wait_until(partial(computes_the_look, service.worker), what="the attention query to begin alone")
        beside = threads.submit(service.text, "once", max_tokens=2)
        until.touch()
        answer = asked.result()
        assert (answer.status_code, len(answer.json()["weights"])) == (200, 4)
        assert beside.result() is not None
        assert service.metric("llm_requests_replayed_total", outcome="gave_up") == 0
