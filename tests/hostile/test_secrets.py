"""API keys never appear in logs, responses, metrics or the process list."""

import json
import signal

import httpx
import pytest

from tests.e2e.process import NO_TLS, PATIENCE_SECONDS, Service, wait_until
from tests.hostile.raw import ALICE, BEARER, BOB, CAROL, exchange, post

pytestmark = pytest.mark.slow

# Invalid here, but secret, too: it may be a valid key of another service, or a mistyped key.
STRANGE = "sk-strange-0123456789abcdef"
BODY = b'{"prompt": "a", "max_tokens": 2}'


def attempts() -> list[dict[str, str]]:
    """Return headers that send API keys in valid and in invalid ways."""
    keys = (ALICE, BOB, CAROL, STRANGE)
    return [
        *({"authorization": f"Bearer {key}"} for key in keys),
        *({"authorization": f"bearer  {key}"} for key in keys),
        *({"authorization": f"Basic {key}"} for key in keys),
        *({"authorization": f"Bearer {key}, Bearer {key}"} for key in keys),
        *({"authorization": key} for key in keys),
        *({"x-api-key": key, "api-key": key, "cookie": f"key={key}"} for key in keys),
    ]


def test_a_key_appears_nowhere(service: Service) -> None:
    told = ""
    for fields in attempts():
        response = httpx.post(
            service.url + "/v1/completions", content=BODY, headers=fields, timeout=PATIENCE_SECONDS, verify=NO_TLS
        )
        told += response.text + str(response.headers)
    assert '"invalid_api_key"' in told
    for key in (ALICE, STRANGE):
        for path in ("/v1/models", "/v1/models/nobody", "/nowhere", "/health", "/metrics"):
            url = f"{service.url}{path}?key={key}&authorization=Bearer%20{key}"
            told += httpx.get(url, headers=BEARER, timeout=PATIENCE_SECONDS, verify=NO_TLS).text
        told += exchange(
            service, f"GET /v1/models HTTP/1.1\r\nauthorization: Bearer {key}\r\n c\r\n\r\n".encode()
        ).text.decode()
        told += exchange(service, f"Authorization: Bearer {key}\r\n\r\n".encode()).text.decode()
        told += exchange(service, f"GET / HTTP/1.1\r\nauthorization: Bearer {key}".encode()).text.decode()
    told += die_and_fail(service)
    processes = [service.process.pid, *(child.pid for child in service.children)]
    for pid in processes:
        with open(f"/proc/{pid}/cmdline", "rb") as words:
            told += words.read().decode()
    log, printed = service.log.read_text(), service.printed.read_text()
    assert "API key alice" in log, "the log has no debug lines"
    assert "API key default" in log
    assert "was killed by SIGKILL" in log
    assert ["api_keys", "alice,", "bob,", "default"] in [line.split() for line in printed.splitlines()]
    for key in (ALICE, BOB, CAROL, STRANGE):
        for part in (key, key.removeprefix("sk-")[:12], key[-12:]):
            assert part not in told + log + printed, part


def die_and_fail(service: Service) -> str:
    """Return the responses to requests that fail: a template error, and the death of a worker."""
    boom = {"messages": [{"role": "user", "content": "boom"}]}
    failed = post(service, json.dumps(boom).encode(), "/v1/chat/completions")
    assert failed.status_code == 500
    restarts = service.metric("llm_worker_restarts_total")
    service.worker.send_signal(signal.SIGKILL)
    revived = post(service, BODY)
    assert revived.status_code == 200
    wait_until(lambda: service.metric("llm_worker_restarts_total") == restarts + 1, what="another worker")
    return failed.text + str(failed.headers) + revived.text
