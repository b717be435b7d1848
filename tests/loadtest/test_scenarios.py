"""Scenario programs that start services: one run of each on a tiny model, and their exit codes."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtest.scenarios import bench_frontend, bench_overload, bench_service
from loadtest.scenarios.bench_frontend import InstantEngine
from loadtest.scenarios.service_benchmark import cpu_seconds
from service.ipc.messages import FinishReason
from tests.service.sequences import make_submit


def run(program: Any, checkpoint: Path, out: Path, *arguments: str) -> dict[str, Any]:
    """Run a program to success, check that it leaves no service behind, and return its JSON."""
    before = services()
    assert program.main(["--checkpoint", str(checkpoint), "--out", str(out), *arguments]) == 0
    assert services() == before
    result: dict[str, Any] = json.loads(out.read_text())
    assert {"commit", "machine", "versions", "command", "date", "other_work_cores", "took_seconds"} <= set(result)
    return result


def services() -> set[psutil.Process]:
    """Return the services that this process started."""
    return {child for child in psutil.Process().children(recursive=True) if "serve" in child.cmdline()}


@pytest.mark.slow
def test_bench_frontend_measures_every_pace_and_number_of_streams(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--streams", "1", "4", "--repeats", "2", "--requests-per-stream", "2", "--output-tokens", "30"]
    result = run(bench_frontend, checkpoint, tmp_path / "frontend.json", *arguments, "--step-ms", "0", "5")
    shapes = [(level["num_streams"], level["num_requests"], level["num_tokens"]) for level in result["levels"]]
    assert shapes == [(1, 2, 30), (4, 8, 30)] * 2
    assert [level["step_ms"] for level in result["levels"]] == [0.0, 0.0, 5.0, 5.0]
    for level in result["levels"]:
        rates, costs = (level[name]["values"] for name in ("tokens_per_second_on_one_core", "cpu_us_per_token"))
        assert [1e6 / rate for rate in rates] == pytest.approx(costs)
        assert len(level["tokens_per_second"]["values"]) == 2
        if level["step_ms"]:
            fastest = level["num_streams"] / (level["step_ms"] / 1000.0)
            assert level["tokens_per_second"]["max"] <= fastest * 1.05


@pytest.mark.slow
def test_bench_service_measures_start_idle_processes_and_both_throughputs(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--streams", "1", "4", "--repeats", "2", "--start-repeats", "1", "--idle-seconds", "1"]
    arguments += ["--prompt-tokens", "16", "--output-tokens", "8", "--", "--threads", "1"]
    result = run(bench_service, checkpoint, tmp_path / "service.json", *arguments)
    assert result["model"]["threads"] == 1
    assert result["start_seconds"]["median"] > 0
    assert {"api", "worker"} <= {process["part"] for process in result["processes"]}
    assert all(process["rss_mb"] > 1 for process in result["processes"])
    assert {process["part"]: process["torch"] for process in result["processes"]}["worker"]
    assert not any(process["torch"] for process in result["processes"] if process["part"] in ("api", "main"))
    assert [(level["streams"], level["requests"]) for level in result["levels"]] == [(1, 4), (4, 8)]
    for level in result["levels"]:
        pairs = zip(level["http_tokens_per_second"]["values"], level["engine_tokens_per_second"]["values"], strict=True)
        assert level["ratio"]["values"] == pytest.approx([http / engine for http, engine in pairs])
        assert level["http_ttft_ms"]["p50"] > 0


@pytest.mark.slow
def test_bench_overload_runs_every_load(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--seconds", "3", "--saturation-seconds", "1", "--settle-seconds", "0.5"]
    arguments += ["--output-tokens", "16", "--", "--threads", "1", "--max-num-running", "4"]
    arguments += ["--target-queue-seconds", "0.05"]
    result = run(bench_overload, checkpoint, tmp_path / "overload.json", *arguments)
    assert "seconds since the first request" in (tmp_path / "overload.html").read_text()
    assert [load["label"] for load in result["loads"]] == ["saturation", "overload", "saturation again"]
    assert [load["failures"] for load in result["loads"]] == [{}, {}, {}]
    assert all(load["completed"] > 0 for load in result["loads"])
    assert set(result["service"]) == {"api", "worker"}
    assert all(part["last_mib"] > 1 for part in result["service"].values())
    assert {user: facts["errors"] for user, facts in result["sdk"].items()} == {"own_key": {}, "key_of_the_flood": {}}
    assert all(facts["completions"] > 0 for facts in result["sdk"].values())
    assert result["throughput_share"] > 0
    assert result["ttft_p99_ratio"] > 0


@pytest.mark.slow
def test_bench_overload_without_an_ended_request_at_saturation_exits_with_one(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--saturation-seconds", "0.001", "--settle-seconds", "0", "--output-tokens", "4"]
    assert bench_overload.main(["--checkpoint", str(checkpoint), *arguments]) == 1
    assert "--saturation-seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "arguments"),
    [(bench_frontend, []), (bench_service, ["--start-repeats", "1"])],
    ids=["frontend", "service"],
)
def test_a_service_that_cannot_start_exits_with_one_and_its_log(
    program: Any, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--checkpoint", str(tmp_path), *arguments]) == 1
    assert "neither config.json nor manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize("program", [bench_service, bench_overload], ids=["service", "overload"])
def test_invalid_settings_of_the_service_are_rejected(
    program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        program.main(["--checkpoint", str(tmp_path), "--", "--threads", "none"])
    assert "--threads" in capsys.readouterr().err


def test_the_instant_engine_returns_each_token_and_one_finish() -> None:
    engine = InstantEngine(step_seconds=0.0)
    for uid, count in (("a", 1), ("b", 3), ("c", 9)):
        engine.submit(make_submit(uid, max_tokens=count))
    received: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for step in range(4):
        result = engine.step()
        assert len(result.events) == (3, 2, 2, 1)[step]
        for event in result.events:
            assert event.index == len(received[event.uid])
            received[event.uid] += event.token_ids
            assert (event.finish is not None) == (len(received[event.uid]) == {"a": 1, "b": 3}.get(event.uid))
            assert event.finish is None or event.finish.reason is FinishReason.LENGTH
    engine.cancel("c")
    assert not engine.has_work
    assert received == {"a": [0], "b": [0] * 3, "c": [0] * 4}


def test_cpu_time_of_processes_comes_from_the_operating_system() -> None:
    own = psutil.Process()
    assert 0 < cpu_seconds([own]) <= cpu_seconds([own, own])
