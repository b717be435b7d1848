"""bench_latency: figures of arrivals, the page, and a measurement on a stub server."""

import json
from typing import Any

import pytest

from loadtest.client.sse_client import Target
from loadtest.docgen.pages import NAMES, RESULTS, performance_page
from loadtest.measurement.benchmark_program import MeasurementFailed
from loadtest.scenarios import bench_latency
from loadtest.scenarios.bench_latency import PromptArrival, gaps_within, measure, steps_between, summarize
from tests.loadtest.stub_server import Script, StubServer

STREAMS = [[0.0, 1.0, 2.0, 5.0, 6.0], [0.5, 1.5, 5.5]]


@pytest.mark.parametrize(("start", "end", "steps"), [(1.0, 5.0, 2), (0.9, 5.0, 3), (2.0, 4.9, 0), (5.0, 6.0, 1)])
def test_steps_are_the_tokens_of_the_stream_with_most(start: float, end: float, steps: int) -> None:
    assert steps_between(STREAMS, start, end) == steps


@pytest.mark.parametrize(
    ("start", "end", "gaps"),
    [(1.2, 1.4, [1.0, 1.0]), (2.5, 4.0, [3.0, 4.0]), (2.0, 5.2, [3.0, 1.0, 4.0]), (6.0, 9.0, [])],
)
def test_gaps_that_overlap_the_interval_count(start: float, end: float, gaps: list[float]) -> None:
    assert gaps_within(STREAMS, start, end) == gaps


def figures(slower: float) -> dict[str, Any]:
    """Return the summary of three arrivals that lengthen the streams' gaps by a factor."""
    values = ((0.02, 2, 0.01), (0.04, 1, 0.02), (0.03, 2, 0.01))
    return summarize(
        [PromptArrival(ttft, steps, before=[gap] * 9, during=[gap * slower] * 9) for ttft, steps, gap in values]
    )


def result() -> dict[str, Any]:
    bounds = ((64, None, 1.5), (512, None, 4.0), (512, 1.75, 2.0))
    points = [
        {"max_batched_tokens": size, "prompt_slowdown": slowdown} | figures(slower) for size, slowdown, slower in bounds
    ]
    return {
        "command": "python -m loadtest.scenarios.bench_latency",
        "shape": "S",
        "serve": ["--dtype", "bfloat16"],
        "short": {"streams": 63, "prompt_tokens": 16} | figures(1.0),
        "long": {"streams": 16, "prompt_tokens": 4096, "points": points},
    }


def test_a_summary_has_every_arrival_and_ratios_within_arrivals() -> None:
    found = figures(4.0)
    assert found["ttft_ms"]["median"] == pytest.approx(30.0)
    assert found["steps"]["values"] == [2.0, 1.0, 2.0]
    assert found["itl_p50_ms_before"] == pytest.approx(10.0)
    assert found["itl_p99_ms_before"]["max"] == pytest.approx(20.0)
    assert found["itl_p99_ratio"]["values"] == pytest.approx([4.0, 4.0, 4.0])
    json.dumps(found)


def latency_part(latency: dict[str, Any]) -> str:
    """Return the page with these figures of latency, and the repository's other results."""
    results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in NAMES}
    return performance_page({**results, "latency": results["latency"] | latency})


def test_the_page_shows_the_figures_of_the_result() -> None:
    page = latency_part(result())
    assert "after 2 (1–2) engine steps" in page
    assert "| 64 | inf | 10.0 (10.0–20.0) | 15.0 (15.0–30.0) | 1.50 | 30 (20–40) |" in page
    assert "| 512 | inf | 10.0 (10.0–20.0) | 40.0 (40.0–80.0) | 4.00 | 30 (20–40) |" in page
    assert "| 512 | 1.75 | 10.0 (10.0–20.0) | 20.0 (20.0–40.0) | 2.00 | 30 (20–40) |" in page


def test_a_budget_without_room_for_a_prompt_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_latency.main(["--budgets", "16", "64"])
    assert ended.value.code == 2
    assert "--budgets: each value must be above --long-streams" in capsys.readouterr().err


def test_arrivals_among_streams_are_measured() -> None:
    with StubServer(Script(gap_seconds=0.01)) as server:
        seen = measure(Target.parse(server.url), 50, streams=2, prompt_tokens=5, num_arrivals=2, seed=0)
    assert len(seen) == 2
    # One read may return two chunks, between which there is no gap.
    assert all(arrival.before and min(arrival.before) >= 0 < max(arrival.before) for arrival in seen)
    prompts = [received.body["prompt"] for received in server.requests]
    assert [len(prompt) for prompt in prompts] == [16, 16, 5, 5]
    assert max(map(max, prompts)) < 49  # the last id may end a text
    assert all(received.body["return_token_ids"] for received in server.requests)


def test_a_rejected_stream_ends_the_measurement_with_its_reason() -> None:
    with StubServer(Script(status=429)) as server, pytest.raises(MeasurementFailed, match="as scripted"):
        measure(Target.parse(server.url), 50, streams=1, prompt_tokens=5, num_arrivals=1, seed=0)
