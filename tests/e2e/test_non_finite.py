"""A request that computes NaN gets a 500, or an error event in a begun stream. Other requests are unaffected."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.ipc.messages import NON_FINITE
from tests.e2e.non_finite import POISON
from tests.e2e.process import PATIENCE_SECONDS, Service, serving

pytestmark = pytest.mark.slow

GOOD = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "temperature": 0, "bad_words": ["\x01"]}
# The first sampled token is POISON, so the second step computes NaN.
LATE = {"prompt": [5, 6, 7], "max_tokens": 5, "allowed_token_ids": [POISON], "return_token_ids": True}


def test_only_requests_that_compute_nan_fail(tiny_checkpoint: Path, tmp_path: Path) -> None:
    # With native kernels, the damaged row of the tied embedding would be a row of the LM head, too.
    flags = ("--attention", "sdpa")
    with serving(tiny_checkpoint, tmp_path, *flags, program="tests.e2e.non_finite") as service:
        expected = service.text(**GOOD)
        with ThreadPoolExecutor(8) as threads:
            good = [threads.submit(service.text, **GOOD) for _ in range(4)]
            refused = [
                threads.submit(service.post, path, **fields)
                for path, fields in (
                    ("/v1/completions", {"prompt": [5, POISON, 6], "max_tokens": 5}),
                    ("/v1/completions", {"prompt": [5, POISON, 6], "max_tokens": 5, "stream": True}),
                    ("/v1/completions", {"prompt": [5, POISON, 6], "max_tokens": 0, "echo": True, "logprobs": 1}),
                    ("/v1/embeddings", {"input": [5, POISON, 6]}),
                    ("/v1/completions", LATE),
                )
            ]
            assert [one.result() for one in good] == [expected] * 4
        for response in (one.result() for one in refused):
            assert (response.status_code, response.headers["x-should-retry"]) == (500, "false"), response.text
            error = {"message": NON_FINITE, "type": "server_error", "param": None, "code": "engine_failed"}
            assert response.json() == {"error": error}
        events = streamed(service)
        assert events[0]["choices"][0]["token_ids"] == [POISON]
        assert events[-1] == {"error": error}
        assert service.metric("llm_non_finite_sequences_total") == len(refused) + 1
        assert service.metric("llm_request_success_total", finished_reason="error") == len(refused) + 1
        assert service.metric("llm_worker_restarts_total") == 0
        assert service.text(**GOOD) == expected


def streamed(service: Service) -> list[dict[str, Any]]:
    """Return the events of a stream that fails after its first token."""
    body = {**LATE, "stream": True}
    with httpx.stream("POST", service.url + "/v1/completions", json=body, timeout=PATIENCE_SECONDS) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]
