"""Who waits for whom: the arithmetic, the page and the picture of it, on a few tokens."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.client.sse_client import Target
from loadtest.docgen import pictures
from loadtest.docgen.performance_page import NAMES, RESULTS, render
from loadtest.measurement.provenance import shows
from loadtest.scenarios import bench_latency
from loadtest.scenarios.bench_latency import Arrivals, Load, gaps_within, measure, percentile, steps_between
from loadtest.scenarios.service_process import ServiceFailed
from tests.loadtest.stub_server import Script, StubServer

STREAMS = [[0.0, 1.0, 2.0, 5.0, 6.0], [0.5, 1.5, 5.5]]


@pytest.mark.parametrize(("start", "end", "steps"), [(1.0, 5.0, 2), (0.9, 5.0, 3), (2.0, 4.9, 0), (5.0, 6.0, 1)])
def test_steps_are_the_tokens_of_who_got_most(start: float, end: float, steps: int) -> None:
    assert steps_between(STREAMS, start, end) == steps


@pytest.mark.parametrize(
    ("start", "end", "gaps"),
    [(1.2, 1.4, [1.0, 1.0]), (2.5, 4.0, [3.0, 4.0]), (2.0, 5.2, [3.0, 1.0, 4.0]), (6.0, 9.0, [])],
)
def test_gaps_count_where_any_part_of_them_does(start: float, end: float, gaps: list[float]) -> None:
    assert gaps_within(STREAMS, start, end) == gaps


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert [percentile(values, share) for share in (0.001, 0.5, 0.99, 1.0)] == [1.0, 100.0, 198.0, 200.0]


def seen(slower: float) -> Arrivals:
    return Arrivals(
        ttft_seconds=[0.02, 0.04, 0.03],
        steps=[2, 1, 2],
        before=[[0.01] * 9, [0.02] * 9, [0.01] * 9],
        during=[[0.01 * slower] * 9, [0.02 * slower] * 9, [0.01 * slower] * 9],
    )


def result() -> dict[str, Any]:
    bounds = ((64, None, 1.5), (512, None, 4.0), (512, 1.75, 2.0))
    points = [
        {"max_batched_tokens": size, "prompt_slowdown": slowdown} | seen(slower).to_dict()
        for size, slowdown, slower in bounds
    ]
    return {
        "command": "python -m loadtest.scenarios.bench_latency",
        "shape": "S",
        "serve": ["--dtype", "bfloat16"],
        "short": {"streams": 63, "prompt_tokens": 16} | seen(1.0).to_dict(),
        "long": {"streams": 16, "prompt_tokens": 4096, "points": points},
    }


def test_arrivals_are_told_each_and_the_gaps_as_ratios_pair_by_pair() -> None:
    told = seen(4.0).to_dict()
    assert told["ttft_ms"]["median"] == pytest.approx(30.0)
    assert told["steps"]["values"] == [2.0, 1.0, 2.0]
    assert told["itl_p50_ms_before"] == pytest.approx(10.0)
    assert told["itl_p99_ms_before"]["max"] == pytest.approx(20.0)
    assert told["itl_p99_ratio"]["values"] == pytest.approx([4.0, 4.0, 4.0])
    json.dumps(told)


def latency_part(latency: dict[str, Any]) -> str:
    """Return the page with these figures of latency, and the repository's other results."""
    results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in NAMES}
    return render({**results, "latency": results["latency"] | latency})


def test_the_page_tells_the_figures_of_the_result() -> None:
    page = latency_part(result())
    assert "after 2 (1–2) engine steps" in page
    assert "| 64 | inf | 10.0 (10.0–20.0) | 15.0 (15.0–30.0) | 1.50 (1.50–1.50) | 30 (20–40) |" in page
    assert "| 512 | inf | 10.0 (10.0–20.0) | 40.0 (40.0–80.0) | 4.00 (4.00–4.00) | 30 (20–40) |" in page
    assert "| 512 | 1.75 | 10.0 (10.0–20.0) | 20.0 (20.0–40.0) | 2.00 (2.00–2.00) | 30 (20–40) |" in page
    assert "](latency.png)" in page


def test_the_picture_is_known_by_its_result(tmp_path: Path) -> None:
    path, other = tmp_path / "latency.png", result()
    other["long"]["streams"] = 17
    pictures.draw_latency(path, result())
    assert shows(path, result())
    assert not shows(path, other)


def test_a_budget_that_leaves_nothing_for_a_prompt_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_latency.main(["--budgets", "16", "64"])
    assert ended.value.code == 2
    assert "--budgets: each value must be above --long-streams" in capsys.readouterr().err


def test_arrivals_among_streams_are_measured() -> None:
    with StubServer(Script(gap_seconds=0.01)) as server:
        seen = asyncio.run(measure(Target.parse(server.url), Load(2, 5, 2, 0), vocab_size=50))
    assert len(seen.ttft_seconds) == len(seen.steps) == len(seen.before) == len(seen.during) == 2
    assert all(gaps and min(gaps) > 0 for gaps in seen.before)
    prompts = [received.body["prompt"] for received in server.requests]
    assert [len(prompt) for prompt in prompts] == [16, 16, 5, 5]
    assert max(map(max, prompts)) < 49  # the last id may end a text
    assert all(received.body["return_token_ids"] for received in server.requests)


def test_a_rejected_stream_ends_the_measurement_with_its_reason() -> None:
    with StubServer(Script(status=429)) as server, pytest.raises(ServiceFailed, match="as scripted"):
        asyncio.run(measure(Target.parse(server.url), Load(1, 5, 1, 0), vocab_size=50))
