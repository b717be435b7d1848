"""Reports: the keys of `vllm bench serve`, figures, failures by kind, and files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.client import report
from loadtest.client.outcome import ClientKind, Ending, LoadRun, Outcome
from loadtest.client.report import Slo
from tests.loadtest.outcomes import failed, outcome

# Keys that `vllm bench serve --save-result --save-detailed` (0.33) writes for a completions endpoint. Kvasir leaves out
# backend, label of the harness, tokenizer, generated texts, and rtfx, which is for audio.
VLLM_KEYS = {
    "date", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration", "completed",
    "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls", "latencies",
    "start_times", "queue_times", "errors", "max_output_tokens_per_s", "max_concurrent_requests",
} | {
    f"{statistic}_{metric}_ms"
    for statistic in ("mean", "median", "std", "p50", "p90", "p95", "p99")
    for metric in ("ttft", "tpot", "itl", "e2el")
}  # fmt: skip


def summary(outcomes: list[Outcome], seconds: float = 2.0) -> dict[str, Any]:
    """Return the summary of a load of two streams."""
    load = LoadRun(outcomes=outcomes, began_seconds=0.0, ended_seconds=seconds, client_cpu_share=0.1)
    return report.summarize(load, label="2 streams", slo=Slo(ttft_p95_ms=150.0), max_concurrency=2)


def test_results_have_the_keys_of_vllm_bench_serve() -> None:
    assert set(summary([outcome(0)])) >= VLLM_KEYS - {"date", "model_id"}  # provenance and service add these two


def test_figures_follow_from_the_outcomes() -> None:
    result = summary([outcome(0), outcome(1, intended_seconds=0.9)])
    assert (result["completed"], result["failed"], result["sent"]) == (2, 0, 2)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 8)
    assert result["output_throughput"] == pytest.approx(4.0)
    assert result["total_token_throughput"] == pytest.approx(14.0)
    assert result["request_throughput"] == pytest.approx(1.0)
    assert result["request_goodput"] == pytest.approx(0.5)  # the second request was sent late: its TTFT is 200 ms
    assert result["median_ttft_ms"] == pytest.approx(150.0)
    assert result["p99_ttft_ms"] == pytest.approx(199.0)
    assert result["mean_itl_ms"] == pytest.approx(20.0)
    assert result["mean_tpot_ms"] == pytest.approx(70 / 3)
    assert result["median_e2el_ms"] == pytest.approx(220.0)
    assert result["queue_times"] == [0.0, pytest.approx(0.1)]
    assert result["start_times"] == [0.0, pytest.approx(0.9)]
    assert result["max_concurrent_requests"] == 1
    assert result["max_output_tokens_per_s"] == 4.0


def test_a_request_that_ends_as_another_begins_is_not_concurrent() -> None:
    touching = [outcome(0, end_seconds=1.0), outcome(1, end_seconds=2.0)]
    overlapping = [outcome(0, end_seconds=1.5), outcome(1, end_seconds=2.0)]
    assert summary(touching)["max_concurrent_requests"] == 1
    assert summary(overlapping)["max_concurrent_requests"] == 2


def test_failures_are_counted_by_kind_and_shed_load_is_not_a_failure() -> None:
    outcomes = [
        outcome(0),
        failed(1, Ending.SHED, "rate_limit_exceeded: queue full"),
        failed(2, Ending.TIMEOUT, "no end within 5 s"),
        failed(3, Ending.TIMEOUT, "no end within 5 s"),
        failed(4, Ending.HTTP_ERROR, "503 draining"),
        outcome(5, ending=Ending.CANCELLED, client=ClientKind.CANCELLING),
    ]
    result = summary(outcomes, 6.0)
    assert (result["sent"], result["completed"], result["failed"]) == (6, 1, 3)
    assert (result["shed"], result["cancelled"]) == (1, 1)
    assert result["failures"] == {"timeout: no end within 5 s": 2, "http_error: 503 draining": 1}
    assert result["total_output_tokens"] == 4  # tokens of cancelled requests do not count
    assert result["slo_breaches"] == ["failed: 50.00% of the requests sent, limit 0.00%"]
    assert result["endings"][1] == "shed"
    table = report.markdown([result])
    assert "- 2 streams: 2 × timeout: no end within 5 s" in table
    assert "broken objective: failed: 50.00%" in table


def test_a_response_that_is_not_streamed_has_no_ttft() -> None:
    whole = outcome(0, client=ClientKind.WHOLE, chunk_seconds=[])
    result = summary([whole])
    assert result["median_ttft_ms"] is result["p99_itl_ms"] is result["mean_tpot_ms"] is None
    assert result["median_e2el_ms"] == pytest.approx(170.0)
    assert "– / – / –" in report.markdown([result])


def test_slow_readers_are_reported_apart() -> None:
    slow = outcome(1, client=ClientKind.SLOW, chunk_seconds=[1.1, 5.0], end_seconds=9.0)
    result = summary([outcome(0), slow], 9.0)
    assert (result["completed"], result["total_output_tokens"]) == (2, 8)
    assert (result["p99_itl_ms"], result["p99_e2el_ms"]) == (pytest.approx(20.0), pytest.approx(170.0))
    assert max(row["p99_itl_ms"] or 0.0 for row in result["timeline"]) == pytest.approx(20.0)
    assert result["request_goodput"] == pytest.approx(2 / 9), "no objective limits the client's own latency"
    assert result["kinds"]["slow reader"]["p50_e2el_ms"] == pytest.approx(8000.0)
    line = "slow reader: 1 sent, 1 ok, 0 failed, 1 good; TTFT p50/p95 100 / 100 ms, E2E p50/p95 8,000 / 8,000 ms"
    assert f"- 2 streams: {line}" in report.markdown([result])


def test_the_table_of_stored_results_is_printed(tmp_path: Path) -> None:
    result = summary([outcome(0), failed(1, Ending.CONNECTION, "reset")])
    stored = tmp_path / "results.json"
    stored.write_text(json.dumps(result))
    command = [sys.executable, "-m", "loadtest.client.report", str(stored), str(stored)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.strip() == report.markdown([result, result]).strip()


def test_a_busy_load_test_is_reported() -> None:
    table = report.markdown([summary([outcome(0)]) | {"client_cpu_share": 0.9}])
    assert "- 2 streams: the load test itself used 90% of a core" in table


def test_a_load_without_a_success_has_a_table() -> None:
    result = summary([failed(0, Ending.CONNECTION, "refused")])
    assert result["output_throughput"] == 0.0
    assert "| 2 streams | 1 | 0 |" in report.markdown([result])


def run(*outcomes: Any) -> LoadRun:
    return LoadRun(outcomes=outcomes, began_seconds=10.0, ended_seconds=20.0, client_cpu_share=0.1)


def answer(sent: float, chunks: list[float], ending: Ending = Ending.OK) -> Any:
    end = max(chunks, default=sent)
    return outcome(ending=ending, intended_seconds=sent, chunk_seconds=chunks, end_seconds=end, completion_tokens=10)


def test_throughput_counts_the_tokens_that_arrive_in_the_measured_time() -> None:
    whole, early, late = answer(11.0, [12.0, 13.0]), answer(8.0, [9.0, 11.0]), answer(19.0, [19.5, 21.0])
    assert run(whole).tokens_per_second == 1.0
    assert run(whole, early, late).tokens_per_second == 2.0
    assert run(whole, early, late).requests_per_second == 0.2
    assert run(answer(1.0, [2.0, 3.0]), answer(12.0, [13.0], Ending.TIMEOUT)).tokens_per_second == 0.0


def test_a_summary_counts_requests_sent_in_the_measured_time() -> None:
    given = run(answer(1.0, [9.0]), answer(11.0, [11.5]), answer(12.0, [], Ending.SHED))
    found = report.summarize(given, label="steady", slo=Slo())
    assert (found["sent"], found["completed"], found["shed"], found["p99_ttft_ms"]) == (2, 1, 1, 500.0)
    assert report.summarize(run(), label="none", slo=Slo())["p99_ttft_ms"] is None
