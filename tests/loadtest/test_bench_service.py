"""The service bench on a real service of a tiny model."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from loadtest.scenarios import bench_service
from loadtest.scenarios.service_process import ServiceFailed, ServiceProcess, cpu_seconds, has_torch


@pytest.mark.slow
def test_it_measures_a_service_and_leaves_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "service.json"
    arguments = ["--checkpoint", str(checkpoint), "--out", str(out), "--streams", "1", "4", "--repeats", "2"]
    arguments += ["--start-repeats", "1", "--idle-seconds", "1", "--prompt-tokens", "16", "--output-tokens", "8"]
    before = _services()
    assert bench_service.main([*arguments, "--", "--threads", "1"]) == 0
    assert _services() == before
    result = json.loads(out.read_text())
    assert {"commit", "machine", "versions", "command", "date", "other_work_cores", "took_seconds"} <= set(result)
    assert result["model"]["threads"] == 1
    assert result["start_seconds"]["median"] > 0
    assert len(result["idle"]["worker_cpu_percent"]["values"]) == bench_service.IDLE_WINDOWS
    torch = {process["part"]: process["torch"] for process in result["processes"]}
    assert (torch["api"], torch["worker"]) == (False, True)
    assert all(process["rss_mb"] > 1 for process in result["processes"])
    assert [(level["streams"], level["requests"]) for level in result["levels"]] == [(1, 4), (4, 8)]
    for level in result["levels"]:
        pairs = zip(level["http_tokens_per_second"]["values"], level["engine_tokens_per_second"]["values"], strict=True)
        assert level["ratio"]["values"] == pytest.approx([http / engine for http, engine in pairs])
        assert level["http_ttft_ms"]["p50"] > 0


def _services() -> set[psutil.Process]:
    """Those of this process; other tests may have theirs."""
    return {child for child in psutil.Process().children(recursive=True) if "serve" in child.cmdline()}


def test_a_service_that_cannot_start_is_reported_with_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--checkpoint", str(tmp_path), "--start-repeats", "1"]
    assert bench_service.main(arguments) == 1
    assert "neither config.json nor manifest.json" in capsys.readouterr().err


def test_settings_that_make_no_sense_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_service.main(["--checkpoint", str(tmp_path), "--", "--threads", "none"])
    assert "--threads" in capsys.readouterr().err


def test_a_service_not_started_has_no_process(tmp_path: Path) -> None:
    with pytest.raises(ServiceFailed, match="not started"):
        ServiceProcess(tmp_path).all_processes()


def test_what_the_system_says_of_a_process() -> None:
    own = psutil.Process()
    assert has_torch(own) == ("torch" in sys.modules)
    assert 0 < cpu_seconds([own]) <= cpu_seconds([own, own])
