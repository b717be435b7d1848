"""Benchmark clients aiperf and guidellm: all requests succeed, and token counts equal the service's metrics."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import CHECKPOINT, ROOT, URL, executable, run, snippet
from tests.e2e.process import Service, clean_environment

NUM_REQUESTS, NUM_TOKENS = 6, 8


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Home directory with the model's tokenizer in the format of transformers."""
    directory = tmp_path / "tokenizer"
    words = ("export-tokenizer", "--checkpoint", str(CHECKPOINT), "--out", str(directory))
    subprocess.run([sys.executable, "-m", "service.cli", *words], cwd=ROOT, env=clean_environment(), check=True)
    return tmp_path


def command(client: str, service: Service) -> list[str]:
    """Return the client's command in docs/clients.md, with the URL of this service."""
    text = snippet(client, "console").replace("\\\n", "").replace(URL, service.url)
    line = re.search(rf"^\$ {client} (.*)", text, re.M)
    assert line is not None
    return [executable(client, client), *shlex.split(line[1])]


def counts(service: Service) -> tuple[float, float]:
    return service.metric("llm_generation_tokens_total"), service.metric("llm_request_failures_total")


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_aiperf(service: Service, home: Path, endpoint: str) -> None:
    words = command("aiperf", service)
    words[words.index("completions")] = endpoint
    num_tokens, num_failures = counts(service)
    quiet = ("--ui", "none", "--no-gpu-telemetry", "--workers-max", "1", "--artifact-dir", "out")
    run(
        [*words, *quiet], home, HF_HUB_OFFLINE=""
    )  # offline, aiperf ignores the tokenizer directory and reads the Hugging Face cache only
    results: dict[str, Any] = json.loads((home / "out" / "profile_export_aiperf.json").read_text())
    assert results["request_count"]["avg"] == NUM_REQUESTS
    assert "error_request_count" not in results
    assert results["total_usage_completion_tokens"]["avg"] == NUM_REQUESTS * NUM_TOKENS
    assert results["time_to_first_token"]["avg"] > 0
    assert results["inter_token_latency"]["avg"] > 0
    assert counts(service) == (num_tokens + NUM_REQUESTS * NUM_TOKENS, num_failures)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(service: Service, home: Path, route: str) -> None:
    words = [word.replace("/v1/completions", route) for word in command("guidellm", service)]
    num_tokens, num_failures = counts(service)
    run([*words, "--disable-progress"], home, GUIDELLM__MAX_WORKER_PROCESSES="1")
    (benchmark,) = json.loads((home / "guidellm.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (NUM_REQUESTS, 0, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == NUM_TOKENS
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0
    assert counts(service) == (num_tokens + NUM_REQUESTS * NUM_TOKENS, num_failures)
