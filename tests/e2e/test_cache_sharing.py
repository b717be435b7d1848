"""Prefix cache and API keys: a request hits only prompts of its own key, unless the server shares the cache."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.process import NO_TLS, PATIENCE_SECONDS, Service, serving

pytestmark = pytest.mark.slow

ANN, BOB = "sk-ann-0123456789abcdef", "sk-bob-0123456789abcdef"
KEYS = {"KVASIR_API_KEYS": f"ann: {ANN}, bob: {BOB}"}
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"


def num_cached(service: Service, key: str, path: str, **fields: Any) -> int:
    headers = {"authorization": f"Bearer {key}"}
    body = {"max_tokens": 1, **fields}
    answer = httpx.post(service.url + path, json=body, headers=headers, timeout=PATIENCE_SECONDS, verify=NO_TLS)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_request_hits_only_prompts_of_its_own_key(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with serving(tiny_checkpoint, tmp_path, "--block-size", "2", **KEYS) as service:
        for path, subject in (
            (_COMPLETIONS, {"prompt": [1, 2, 3, 4, 5, 6, 7]}),
            (_CHAT, {"messages": [{"role": "user", "content": "once upon a time in the theatre"}]}),
        ):
            assert num_cached(service, ANN, path, **subject) == 0
            num_own = num_cached(service, ANN, path, **subject)
            assert num_own >= 6
            assert num_cached(service, BOB, path, **subject) == 0
            assert num_cached(service, BOB, path, **subject, cache_salt="ann") == 0
            assert num_cached(service, BOB, path, **subject) == num_own


def test_a_setting_shares_the_cache_among_keys(tiny_checkpoint: Path, tmp_path: Path) -> None:
    asked = {"prompt": [1, 2, 3, 4, 5, 6, 7]}
    with serving(tiny_checkpoint, tmp_path, "--block-size", "2", "--share-prefix-cache", **KEYS) as service:
        assert num_cached(service, ANN, _COMPLETIONS, **asked) == 0
        assert num_cached(service, BOB, _COMPLETIONS, **asked) == 6
        assert num_cached(service, BOB, _COMPLETIONS, **asked, cache_salt="mine") == 0
