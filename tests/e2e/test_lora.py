"""LoRA adapters over HTTP: chosen by `model`, kept through a worker's death, loaded and unloaded while requests run."""

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from model.tokenizer.files import load_tokenizer
from service.cli.main import main
from tests.e2e.process import PATIENCE_SECONDS, Service, free_port, serving, wait_until
from tests.families.models import Case, load
from tests.families.tokenizer_files import write_byte_level
from tests.lora.adapter_files import merge, write_adapter
from tests.lora.engines import AdaptedEngine
from tests.service.streams import events

TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
VOCAB_SIZE, CONTEXT = 512, 1024
PROMPT = "The dog did not cross the road as it was too tired. "


@dataclass(frozen=True)
class Served:
    """Running service whose adapter "first" is loaded at the start, and "second" and "third" are in --lora-dir."""

    service: Service
    base: Path
    root: Path

    def logprobs(self, model: str, **fields: Any) -> list[float]:
        values = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0, **fields}
        choice = self.service.complete(PROMPT, model=model, **values)["choices"][0]
        return list(choice["logprobs"]["token_logprobs"])

    def load(self, name: str, path: str) -> httpx.Response:
        return self.service.post("/v1/load_lora_adapter", lora_name=name, lora_path=path)

    def unload(self, name: str) -> httpx.Response:
        return self.service.post("/v1/unload_lora_adapter", lora_name=name)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("lora")
    base, root = directory / "base", directory / "adapters"
    case = Case("qwen3", {"tie_word_embeddings": True})
    case.build(vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT).save_pretrained(base)
    write_byte_level(base, VOCAB_SIZE)
    for seed, name in enumerate(("first", "second", "third")):
        write_adapter(root / name, base, TARGETS, seed=seed, rank=5 + seed)
    flags = "--dtype", "float32", "--lora", f"first={root / 'first'}", "--lora-dir", str(root)
    with serving(base, directory, *flags) as service:
        yield Served(service, base, root)


def merged_logprobs(served: Served, name: str, directory: Path) -> list[float]:
    """Return the logprobs of the model with an adapter merged into its weights, in an engine of this process."""
    merged = merge(served.base, served.root / name, directory / "merged")
    engine = AdaptedEngine(load(merged), merged, {}, load_tokenizer(merged))
    ids = served.service.post("/tokenize", prompt=PROMPT).json()["tokens"]
    (found,) = engine.run(engine.submit_of("a", "", ids, max_tokens=12, prompt_logprobs=None)).values()
    return [logprob for _, logprob in found]


def test_requests_choose_an_adapter_by_model(served: Served, tmp_path: Path) -> None:
    adapted, plain = served.logprobs("first"), served.logprobs("base")
    assert adapted == pytest.approx(merged_logprobs(served, "first", tmp_path), abs=1e-4)
    assert adapted != pytest.approx(plain, abs=0.05)
    cards = served.service.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("base", None), ("first", "base")]
    assert served.service.get("/v1/models/first").json() == cards[1]


def test_every_route_computes_the_adapter_and_returns_its_name(served: Served) -> None:
    messages = [{"role": "user", "content": "Where is the dog?"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 8, "temperature": 0},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 8, "temperature": 0},
        "/v1/responses": {"input": "Where is the dog?", "max_output_tokens": 8, "temperature": 0},
        "/v1/messages": {"messages": messages, "max_tokens": 8, "temperature": 0},
        "/v1/embeddings": {"input": PROMPT},
        "/v1/score": {"text_1": PROMPT, "text_2": "The cat"},
    }
    varied = {"id", "created", "created_at", "model", "timings"}
    for path, body in bodies.items():
        found = {}
        for model in ("base", "first"):
            response = served.service.post(path, model=model, **body)
            assert response.status_code == 200, response.text
            assert response.json()["model"] == model, path
            found[model] = json.dumps({key: value for key, value in response.json().items() if key not in varied})
        assert found["base"] != found["first"], path


def test_prefixes_are_shared_only_within_an_adapter(served: Served) -> None:
    ids = list(range(5, 105))

    def num_cached(model: str) -> int:
        usage = served.service.complete(ids, model=model, max_tokens=1)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [num_cached(model) for model in ("base", "first", "base", "first")] == [0, 0, 96, 96]


def load_stream_and_unload(served: Served) -> None:
    """Load an adapter, and unload it during a stream, which must be whole."""
    assert served.load("second", "second").text == "Success: LoRA adapter 'second' added successfully."
    alone = served.logprobs("second", max_tokens=300)
    body = {"model": "second", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    with httpx.stream(
        *("POST", served.service.url + "/v1/completions"),
        json={**body, "stream": True, "logprobs": 0},
        timeout=PATIENCE_SECONDS,
    ) as response:
        parts = response.iter_text()
        first = next(parts)
        assert served.unload("second").text == "Success: LoRA adapter 'second' removed successfully."
        assert served.service.post(prompt="a", model="second").status_code == 404
        text = first + "".join(parts)
    choices = [choice for event in events(text) for choice in event["choices"]]
    streamed = [logprob for choice in choices for logprob in (choice["logprobs"] or {}).get("token_logprobs", ())]
    assert streamed == alone


def test_adapters_are_loaded_and_unloaded_while_requests_run(served: Served, tmp_path: Path) -> None:
    expected = served.logprobs("first")
    stop = threading.Event()

    def ask_again() -> int:
        num_asked = 0
        while not stop.is_set():
            assert served.logprobs("first") == expected
            num_asked += 1
        return num_asked

    with ThreadPoolExecutor(3) as pool:
        loops = [pool.submit(ask_again) for _ in range(3)]
        try:
            for _ in range(3):
                load_stream_and_unload(served)
        finally:
            stop.set()
        assert all(loop.result() > 0 for loop in loops)
    names = [card["id"] for card in served.service.get("/v1/models").json()["data"]]
    assert names == ["base", "first"]
    assert served.logprobs("first") == expected


def test_a_new_worker_continues_requests_with_their_adapters(served: Served) -> None:
    assert served.load("third", "third").status_code == 200
    expected = {model: served.logprobs(model, max_tokens=900) for model in ("base", "first", "third")}
    with ThreadPoolExecutor(3) as pool:
        asked = {model: pool.submit(served.logprobs, model, max_tokens=900) for model in expected}
        worker = served.service.worker
        wait_until(lambda: served.service.metric("llm_num_requests_running") == 3, seconds=60, what="three requests")
        served.unload("third")
        worker.send_signal(signal.SIGKILL)
        assert {model: future.result() for model, future in asked.items()} == expected
    assert served.service.metric("llm_worker_restarts_total") == 1
    assert served.service.metric("llm_requests_replayed_total", outcome="resubmitted") == 3
    assert served.service.post(prompt="a", model="third").status_code == 404


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("x", "../base", "lora_path: '../base' is not below --lora-dir"),
        ("x", "/etc", "lora_path: '/etc' is not below --lora-dir"),
        ("x", ".", "lora_path: '.' is not below --lora-dir"),
        ("x", "none", "none: no such directory; give one with adapter_config.json"),
        ("x", "a" * 256, "a" * 256 + ": File name too long"),
        ("base", "second", "lora_name: 'base' is a name of the base model; choose another"),
        ("first", "second", "lora_name: 'first' is loaded already; unload it first"),
        ("", "second", "lora_name must not be empty"),
    ],
)
def test_a_request_to_load_that_cannot_be_served_is_rejected(
    served: Served, name: str, path: str, message: str
) -> None:
    response = served.load(name, path)
    assert (response.status_code, response.json()["error"]["message"][: len(message)]) == (400, message)
    assert str(served.root) not in response.text


def test_a_missing_adapter_cannot_be_unloaded(served: Served) -> None:
    assert served.unload("x").status_code == 404
    assert served.service.post("/inspect/attention", prompt="a", layer=0, head=0, model="first").status_code == 400


def test_a_bad_adapter_ends_the_start_with_one_line(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag, message in {
        f"a={tmp_path / 'none'}": f"{tmp_path / 'none'}: no such directory",
        f"base={served.root / 'first'}": f"--lora base={served.root / 'first'}: base is a name of the base model",
        "first": "--lora: must be NAME=DIR",
    }.items():
        assert main(["serve", "--checkpoint", str(served.base), "--port", str(free_port()), "--lora", flag]) != 0
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
