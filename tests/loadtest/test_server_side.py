"""The server's part of a request's time, by the metric names of Kvasir, vLLM, SGLang and llama.cpp."""

from typing import Any

import pytest

from loadtest.client.outcome import Ending
from loadtest.client.sse_client import Target
from loadtest.sweep.server_side import limiting_factor, phases_ms, scrape
from tests.loadtest.outcomes import failed, outcome
from tests.loadtest.stub_server import StubServer

DONE = [outcome(0), outcome(1), failed(2, Ending.SHED)]  # two requests of 170 ms


def histograms(queue_name: str, prefix: str, count: int) -> dict[str, float]:
    """Return the samples of requests that wait 20 ms, have their first token after 100 ms, and end after 160 ms."""
    seconds = {queue_name: 0.02, "time_to_first_token_seconds": 0.1, "e2e_request_latency_seconds": 0.16}
    return {
        f"{prefix}{name}_{part}": value
        for name, each in seconds.items()
        for part, value in (("sum", count * each), ("count", float(count)))
    }


@pytest.mark.parametrize(
    ("prefix", "queue_name"),
    [
        ("llm_", "request_queue_time_seconds"),
        ("vllm:", "request_queue_time_seconds"),
        ("sglang:", "queue_time_seconds"),
    ],
)
def test_histograms_show_queue_prefill_and_decode(prefix: str, queue_name: str) -> None:
    before, after = (histograms(queue_name, prefix, count) for count in (5, 7))
    phases = phases_ms(before, after, DONE)
    assert phases == pytest.approx({"queue": 20.0, "prefill": 80.0, "decode": 60.0, "network": 10.0})
    assert str(limiting_factor({"server_ms": phases})).startswith("reading prompts (prefill), 53% of")


def test_counters_of_llama_cpp_leave_the_queue_to_the_rest() -> None:
    after = {"llamacpp:prompt_seconds_total": 0.06, "llamacpp:tokens_predicted_seconds_total": 0.2}
    phases = phases_ms({"llamacpp:prompt_seconds_total": 0.02}, after, DONE)
    assert phases == {
        "queue": None, "prefill": pytest.approx(20.0), "decode": pytest.approx(100.0), "network": pytest.approx(50.0)
    }  # fmt: skip


@pytest.mark.parametrize("outcomes", [DONE, []])
def test_a_server_without_metrics_has_no_phases(outcomes: list[Any]) -> None:
    with StubServer() as server:
        assert scrape(Target.parse(server.url)) == {}
    phases = phases_ms({}, {}, outcomes)
    assert set(phases.values()) == {None}
    assert limiting_factor({"server_ms": phases}) is None
