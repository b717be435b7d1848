"""HTTP interface as other programs read it: schemathesis on the OpenAPI document, its examples, openai's client."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import openai
import pytest

from service.api.openapi import openapi_document
from tests.clients.environments import MODEL, URL, snippet
from tests.e2e.process import PATIENCE_SECONDS, Service, serving

pytestmark = pytest.mark.slow

# The other checks need facts that the OpenAPI document does not state, such as which prompts fit.
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,negative_data_rejection,unsupported_method,allow_header_conformance,ignored_auth"
)
EXAMPLES = [
    pytest.param(path, example["value"], id=f"{path} {name}")
    for path, methods in openapi_document()["paths"].items()
    if "requestBody" in methods.get("post", {}) and not path.endswith("_lora_adapter")  # needs files: test_lora.py
    for name, example in methods["post"]["requestBody"]["content"]["application/json"]["examples"].items()
]


@pytest.fixture(scope="module")
def service(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Start a service with a short context and few slots: long completions for schemathesis would take minutes."""
    few = ("--max-num-running", "2", "--max-waiting-requests", "2")
    flags = ("--model-name", MODEL, "--max-context-length", "40", *few)
    with serving(tiny_checkpoint, tmp_path_factory.mktemp("service"), *flags) as running:
        yield running


@pytest.mark.parametrize(("path", "body"), EXAMPLES)
def test_every_example_of_the_openapi_document_succeeds(service: Service, path: str, body: dict[str, Any]) -> None:
    response = service.post(path, **body)
    assert response.status_code == 200, response.text
    kind = "text/event-stream" if body.get("stream") else "application/json"
    assert response.headers["content-type"].startswith(kind)


def test_schemathesis_finds_no_error(service: Service, tmp_path: Path) -> None:
    """Send the examples, both sides of each field's bounds, and two random requests per operation from a fixed seed."""
    # An invalid request with a short timeout may be rejected because of its time in the queue.
    refusals = ", ".join(f'"{status}"' for status in (400, 401, 403, 404, 405, 408, 413, 415, 429, "5xx"))
    (tmp_path / "schemathesis.toml").write_text(
        f"[checks.negative_data_rejection]\nexpected-statuses = [{refusals}]\n", encoding="utf-8"
    )
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    words = ("run", f"{service.url}/openapi.json", "--checks", CHECKS, "--phases", "examples,coverage,fuzzing")
    terms = ("--generation-deterministic", "--max-examples", "2", "--continue-on-failure")
    output = ("--no-color", "--output-sanitize", "false", "--request-timeout", "300")
    done = subprocess.run(
        [sys.executable, "-c", program, *words, *terms, *output],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    num_operations = sum(map(len, openapi_document()["paths"].values())) - 1  # not the document itself
    assert f"{num_operations} selected / {num_operations} total" in done.stdout
    assert "Traceback" not in service.log.read_text()


def test_the_openai_snippet_of_the_clients_page_runs(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    code = snippet("openai for Python", "python").replace(URL, service.url)
    exec(compile(code, "clients.md", "exec"), {})
    sampling = {"max_tokens": 20, "temperature": 0}
    text = service.text("Once upon a time", **sampling)
    question = [{"role": "user", "content": "Tell me a story."}]
    answer = service.post("/v1/chat/completions", messages=question, **sampling).json()
    assert capsys.readouterr().out == f"{text}\n{answer['choices'][0]['message']['content']}"


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": -1}, openai.BadRequestError, "invalid_request"),
        ({"max_tokens": 100}, openai.BadRequestError, "context_length_exceeded"),
    ],
)
def test_the_openai_client_raises_its_own_errors(
    service: Service, fields: dict[str, Any], kind: type[openai.APIStatusError], code: str
) -> None:
    with openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(kind) as raised:
            client.completions.create(**{"model": MODEL, "prompt": "Once", **fields})
        assert raised.value.code == code
        with pytest.raises(kind) as raised:
            client.completions.create(**{"model": MODEL, "prompt": "Once", "stream": True, **fields})
        assert raised.value.code == code


def test_a_full_queue_is_a_rate_limit_error_of_the_openai_client(service: Service) -> None:
    """Two choices run, two may wait, and the worker is stopped: two requests of two choices fit, a third does not."""
    many: dict[str, Any] = {"model": MODEL, "prompt": "a", "n": 2, "max_tokens": 1, "seed": 1}
    worker = service.worker
    with openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        worker.suspend()
        with ThreadPoolExecutor(3) as pool:
            try:
                asked = [pool.submit(lambda: client.completions.create(**many)) for _ in range(3)]
                (refused,), admitted = wait(asked, timeout=PATIENCE_SECONDS, return_when=FIRST_COMPLETED)
            finally:
                worker.resume()
    with pytest.raises(openai.RateLimitError) as raised:
        refused.result()
    assert raised.value.code == "queue_full"
    headers = raised.value.response.headers
    assert int(headers["retry-after"]) >= 1
    assert int(headers["retry-after-ms"]) >= 1
    assert headers["x-should-retry"] == "true"
    assert service.metric("llm_admission_rejections_total", reason="queue_full") >= 1
    assert [len(answer.result().choices) for answer in admitted] == [2, 2]
