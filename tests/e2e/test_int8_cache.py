"""Server with an int8 KV-cache: prefix-cache hits and the death of its worker change no byte of a response."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import Service, alive, serving, wait_until

pytestmark = pytest.mark.slow

PROMPT = "once upon a time there was an inn in the rain, " * 4


def _answer(service: Service, **fields: Any) -> tuple[Any, int]:
    """Return the choices of a completion, and how many prompt tokens the prefix cache held."""
    body = service.complete(PROMPT, temperature=1.0, seed=3, logprobs=2, ignore_eos=True, **fields)
    return body["choices"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_an_int8_cache_survives_hits_and_worker_deaths(long_checkpoint: Path, tmp_path: Path) -> None:
    """A model in bfloat16; tests/engine/test_cache_dtype.py has models in float32."""
    with serving(long_checkpoint, tmp_path, "--kv-cache-dtype", "int8", "--dtype", "bfloat16") as service:
        assert service.metric("llm_cache_config_info", cache_dtype="int8") == 1
        first, num_cached = _answer(service, max_tokens=1500)
        assert num_cached == 0
        again, num_cached = _answer(service, max_tokens=1500)
        assert num_cached > 0
        assert again == first
        generated = service.metric("llm_generation_tokens_total")
        with ThreadPoolExecutor(1) as threads:
            interrupted = threads.submit(_answer, service, max_tokens=1500)
            wait_until(lambda: service.metric("llm_generation_tokens_total") > generated + 50, what="50 tokens")
            worker = service.worker
            worker.send_signal(signal.SIGKILL)
            wait_until(lambda: not alive([worker]), what="the worker's end")
            assert interrupted.result()[0] == first
        assert service.metric("llm_worker_restarts_total") == 1
