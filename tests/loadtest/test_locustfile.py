"""Load test by locust, run as a program, because locust patches the standard library."""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import numpy as np
import pytest

from loadtest.client.arrivals import arrivals
from loadtest.client.sse_client import Target, discover
from loadtest.client.workload import WorkloadKind, WorkloadSpec
from tests.loadtest.stub_server import CERTIFICATE, Script, StubServer

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


def locust(host: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary"]
    command += ["--host", host, "-u", "4", "-r", "4", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)


def rows(stdout: str) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in json.loads(stdout)}


def results(directory: Path) -> dict[str, Any]:
    """Return the results of the only run in a directory."""
    (path,) = directory.glob("*-locust/results.json")
    assert path.with_suffix(".html").is_file()
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_rows_and_results_count_every_request_and_a_failure_exits_with_one(tmp_path: Path) -> None:
    scripts = [Script(first_seconds=0.06, gap_seconds=0.01)] * 6 + [Script(status=429), Script(status=503)]
    with StubServer(lambda ordinal: scripts[ordinal % len(scripts)]) as server:
        done = locust(
            server.url, "-t", "200s", "--requests", "60", "--output-tokens", "9", "--canary-share", "0",
            "--whole-share", "0.2", "--cancelling-share", "0.2", "--slow-share", "0.2",
            "--slow-bytes-per-second", "20000",
            "--results", str(tmp_path), "--json-file", str(tmp_path / "locust"),
        )  # fmt: skip
    assert done.returncode == 1, done.stderr  # a 503 is a failure, and none were allowed
    assert "broken objective: failed" in done.stdout
    assert "http_error: 503 scripted: as scripted" in done.stdout

    seen = rows((tmp_path / "locust.json").read_text())
    assert set(seen) == {"TTFT", "ITL", "ITL P99", "TPOT", "E2E", "SHED", "CANCEL", "SLOW"}
    assert seen["ITL"]["num_requests"] <= seen["TTFT"]["num_requests"] < 60, "a stream counts once"
    assert any(float(time) % 1 for time in seen["ITL"]["response_times"]), "not rounded to milliseconds"
    failed = seen["E2E"]["num_failures"] + seen["SLOW"]["num_failures"]
    assert seen["E2E"]["num_failures"] > 0
    assert sum(row["num_failures"] for row in seen.values()) == failed
    # The server's pause is the least latency that can be reported, on any machine.
    assert seen["TTFT"]["min_response_time"] >= 60

    result = results(tmp_path)
    assert sum(row["rejected"] for row in result["timeline"]) > 0.0
    assert result["sent"] == 60 == sum(seen[kind]["num_requests"] for kind in ("E2E", "SHED", "CANCEL", "SLOW"))
    assert 0 < result["kinds"]["slow reader"]["completed"] <= seen["SLOW"]["num_requests"]
    assert (result["shed"], result["cancelled"]) == (seen["SHED"]["num_requests"], seen["CANCEL"]["num_requests"])
    assert result["failures"] == {"http_error: 503 scripted: as scripted": failed}
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
    assert re.search(r"Aggregated +9 ", kept.stdout + kept.stderr), "no row of a stream counts as a request"
    assert missed.returncode == 1
    assert "TTFT p95" in missed.stdout


def test_an_open_loop_counts_latency_from_the_arrival_of_a_request(tmp_path: Path) -> None:
    """Four users can send 40 requests per second to a server that takes 0.1 s, and 200 requests arrive per second."""
    with StubServer(Script(first_seconds=0.1)) as server:
        done = locust(
            server.url, "-t", "200s", "--requests", "20", "--rate", "200", "--seed", "3", "--results", str(tmp_path)
        )
    assert done.returncode == 0, done.stderr
    result = results(tmp_path)
    assert (result["label"], result["request_rate"], result["model_id"]) == ("200 per s", 200.0, "stub")
    expected = list(itertools.islice(arrivals(200.0, 3), 20))
    assert result["start_times"] == pytest.approx([arrival - expected[0] for arrival in expected], abs=1e-6)
    assert max(result["queue_times"]) > 0.1
    assert all(ttft >= late + 0.1 for ttft, late in zip(result["ttfts"], result["queue_times"], strict=True))


def test_the_api_key_is_sent_and_never_printed_or_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_API_KEY", "sk-Secret")
    with StubServer(is_secure=True) as server:
        arguments = ("-t", "200s", "--requests", "4", "--results", str(tmp_path), "--ca-file", str(CERTIFICATE))
        done = locust(server.url, *arguments)
    assert done.returncode == 0, done.stderr
    assert server.keys == ["Bearer sk-Secret"] * (2 + len(server.requests)), "models and tokens are asked for too"
    assert "sk-Secret" not in done.stdout + done.stderr + json.dumps(results(tmp_path))


def test_two_workers_send_the_requests_of_one_process_and_their_master_reports_them(tmp_path: Path) -> None:
    scripts, port = [Script(first_seconds=0.03, gap_seconds=0.002), Script(status=429)], free_port()
    with StubServer(lambda ordinal: scripts[ordinal % 5 == 4]) as server:
        _, workload = discover(Target.parse(server.url), WorkloadSpec(kind=WorkloadKind.LOGNORMAL, seed=3))
        done = locust(
            server.url, "-t", "200s", "--processes", "2", "--master-port", port, "--master-bind-port", port,
            "--requests", "40", "--rate", "100", "--seed", "3",
            "--workload", "lognormal", "--canary-share", "0", "--results", str(tmp_path),
            "--json-file", str(tmp_path / "locust"),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = sorted((request.prompt, request.seed) for request in map(workload.request, range(40)))
    assert sorted((received.body["prompt"], received.body["seed"]) for received in server.requests) == whole
    seen, result = rows((tmp_path / "locust.json").read_text()), results(tmp_path)
    assert (seen["E2E"]["num_requests"], seen["SHED"]["num_requests"]) == (32, 8)
    assert (result["sent"], result["completed"], result["shed"], result["failed"]) == (40, 32, 8, 0)
    assert result["total_output_tokens"] == sum(map(len, result["chunk_times"]))
    gaps = [gap for itls in result["itls"] for gap in itls]
    assert result["p99_itl_ms"] == pytest.approx(1e3 * float(np.percentile(gaps, 99)))
    assert min(ttft for ttft in result["ttfts"] if ttft is not None) >= 0.03
    # Together the workers send at the times of one process, each from its own beginning.
    offsets = list(itertools.islice(arrivals(100.0, 3), 40))
    for first in (0, 1):
        times = result["start_times"][first::2]
        expected = [offset - offsets[first] for offset in offsets[first::2]]
        assert [moment - times[0] for moment in times] == pytest.approx(expected, abs=1e-4)


def test_options_and_charts_are_in_locusts_web_page(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "loadtest", "--web-host", "127.0.0.1", "--web-port", port]
    command += ["--results", str(tmp_path), "--canary-share", "0"]
    with StubServer(Script(gap_seconds=0.01)) as server, subprocess.Popen(command, cwd=ROOT) as page:
        try:
            text = eventually(lambda: get(url).decode())
            assert '"slo_ttft_p95_ms"' in text
            assert '"workload"' in text
            assert str(tmp_path) not in text, "no directory is chosen by a form"
            assert get(url + re.findall(r'src="\.(/charts\.js)"', text)[0])
            form = {"user_count": 2, "spawn_rate": 2, "host": server.url, "workload": "lognormal", "output_tokens": 5}
            form |= {"slo_ttft_p95_ms": "60000", "slo_e2e_p95_ms": "", "rate": "", "requests": ""}
            assert json.loads(get(url + "/swarm", urlencode(form).encode()))["success"]
            shown = eventually(lambda: [row for row in json.loads(get(url + "/charts/rows")) if row["p99_itl_ms"]])
            assert shown[0]["tokens"] > 0.0
            # Lengths vary around the form's 5 only in its workload.
            assert eventually(lambda: any(received.body["max_tokens"] > 5 for received in server.requests))
            get(url + "/stop", b"")
            result = eventually(lambda: results(tmp_path))
        finally:
            page.terminate()
    assert page.returncode == 0
    assert result["slo_breaches"] == []


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def get(url: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(url, body, timeout=60) as response:
        content: bytes = response.read()
    return content


def eventually(find: Callable[[], T]) -> T:
    """Return the first true result."""
    for _ in range(600):
        with suppress(OSError, ValueError):
            if found := find():
                return found
        time.sleep(0.1)
    return find()


def test_help_lists_the_options_of_locust_and_of_the_load_test() -> None:
    done = subprocess.run([sys.executable, "-m", "loadtest", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert {"--headless", "--workload", "--slo-ttft-p95-ms"} <= set(re.findall(r"--[\w-]+", done.stdout))


def test_an_unreachable_service_exits_with_two_and_one_line() -> None:
    with StubServer() as server:
        pass
    done = locust(server.url, "-t", "200s")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "loadtest: cannot start a load test of http://127.0.0.1:" in last
    assert last.endswith("Connection refused")
    assert "Traceback" not in done.stderr
