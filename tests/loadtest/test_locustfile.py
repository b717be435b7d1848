"""Load test by locust, run as a program, because locust patches the standard library."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.client.arrivals import arrivals
from tests.loadtest.stub_server import Script, StubServer

ROOT = Path(__file__).parents[2]


def locust(host: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary"]
    command += ["--host", host, "-u", "4", "-r", "4", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)


def rows(stdout: str) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in json.loads(stdout)}


def test_rows_and_results_count_every_request_and_a_failure_exits_with_one(tmp_path: Path) -> None:
    scripts = [Script(first_seconds=0.06, gap_seconds=0.01)] * 6 + [Script(status=429), Script(status=503)]
    with StubServer(lambda ordinal: scripts[ordinal % len(scripts)]) as server:
        done = locust(
            server.url, "-t", "200s", "--requests", "60", "--output-tokens", "9", "--canary-share", "0",
            "--whole-share", "0.2", "--cancelling-share", "0.2",
            "--results", str(tmp_path), "--json-file", str(tmp_path / "locust"),
        )  # fmt: skip
    assert done.returncode == 1, done.stderr  # a 503 is a failure, and none were allowed
    assert "broken objective: failed" in done.stdout
    assert "http_error: 503 scripted: as scripted" in done.stdout

    seen = rows((tmp_path / "locust.json").read_text())
    assert set(seen) == {"TTFT", "ITL", "TPOT", "E2E", "SHED", "CANCEL"}
    assert seen["E2E"]["num_failures"] > 0
    assert all(row["num_failures"] == 0 for kind, row in seen.items() if kind != "E2E")
    # The server's pause is the least latency that can be reported, on any machine.
    assert seen["TTFT"]["min_response_time"] >= 60

    result = json.loads((tmp_path / "results.json").read_text())
    assert result["sent"] == 60 == sum(seen[kind]["num_requests"] for kind in ("E2E", "SHED", "CANCEL"))
    assert (result["shed"], result["cancelled"]) == (seen["SHED"]["num_requests"], seen["CANCEL"]["num_requests"])
    assert result["failures"] == {"http_error: 503 scripted: as scripted": seen["E2E"]["num_failures"]}
    assert result["command"].startswith("locust -f loadtest/locustfile.py")
    streams = zip(result["ttfts"], result["latencies"], result["endings"], strict=True)
    gaps = [latency - first for first, latency, ending in streams if first is not None and ending == "ok"]
    # A client that buffers reports the first token of every stream with the last; a delayed client does so at times.
    assert max(gaps) > 0.04


def test_exit_code_is_zero_for_met_objectives_and_one_for_missed() -> None:
    with StubServer(Script(first_seconds=0.02)) as server:
        kept = locust(
            server.url, "-t", "200s", "--requests", "9", "--slo-ttft-p95-ms", "60000", "--slo-max-shed-share", "0"
        )
        missed = locust(server.url, "-t", "200s", "--requests", "9", "--slo-ttft-p95-ms", "19")
    assert kept.returncode == 0, kept.stderr
    assert missed.returncode == 1
    assert "TTFT p95" in missed.stdout


def test_an_open_loop_counts_latency_from_the_arrival_of_a_request(tmp_path: Path) -> None:
    """Four users can send 40 requests per second to a server that takes 0.1 s, and 200 requests arrive per second."""
    with StubServer(Script(first_seconds=0.1)) as server:
        done = locust(
            server.url, "-t", "200s", "--requests", "20", "--rate", "200", "--seed", "3", "--results", str(tmp_path)
        )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "results.json").read_text())
    assert (result["label"], result["request_rate"], result["model_id"]) == ("200 per s", 200.0, "stub")
    expected = list(itertools.islice(arrivals(200.0, 3), 20))
    assert result["start_times"] == pytest.approx([arrival - expected[0] for arrival in expected], abs=1e-6)
    assert max(result["queue_times"]) > 0.1
    assert all(ttft >= late + 0.1 for ttft, late in zip(result["ttfts"], result["queue_times"], strict=True))


def test_the_api_key_is_sent_and_never_printed_or_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_API_KEY", "sk-Secret")
    with StubServer() as server:
        done = locust(server.url, "-t", "200s", "--requests", "4", "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert server.keys == ["Bearer sk-Secret"] * (2 + len(server.requests)), "models and tokens are asked for too"
    assert "sk-Secret" not in done.stdout + done.stderr + (tmp_path / "results.json").read_text()


def test_times_below_a_millisecond_are_not_rounded_away(tmp_path: Path) -> None:
    with StubServer() as server:
        done = locust(server.url, "-t", "200s", "--requests", "9", "--json-file", str(tmp_path / "locust"))
    assert done.returncode == 0, done.stderr
    times = rows((tmp_path / "locust.json").read_text())["ITL"]["response_times"]
    assert any(float(time) % 1 for time in times)


def test_an_unreachable_service_exits_with_two_and_one_line() -> None:
    with StubServer() as server:
        pass
    done = locust(server.url, "-t", "200s")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "loadtest: cannot start a load test of http://127.0.0.1:" in last
    assert last.endswith("Connection refused")
    assert "Traceback" not in done.stderr
