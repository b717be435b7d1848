"""The performance page: from JSON alone, honest about what was missed, and equal to what the repository holds."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest import performance_page


def spread(median: float) -> dict[str, Any]:
    return {"median": median, "min": 0.9 * median, "max": 1.1 * median, "values": [median]}


FACTS: dict[str, Any] = {
    "date": "2026-01-02 03:04 UTC",
    "commit": "abcdef",
    "machine": {"processor": "Abacus", "cores": 2, "memory_gib": 24.0, "system": "Linux"},
    "other_work_cores": 0.04,
    "took_seconds": 123.4,
    "versions": {"python": "3.11.2", "torch": "2.13.0"},
    "model": {"name": "tiny", "parameters": 6_600_000, "dtype": "float32", "device": "cpu", "threads": 2},
}
ENGINE = FACTS | {
    "kind": "engine",
    "command": "kvasir bench --checkpoint checkpoints/tiny",
    "points": [
        {
            "batch_size": 16,
            "prompt_tokens": 64,
            "output_tokens": 32,
            "tokens_per_second": spread(1234.0),
            "prefill_tokens_per_second": spread(5000.0),
            "decode_tokens_per_second": spread(1500.0),
            "decode_ratio": spread(0.8),
            "ttft_ms": spread(12.0),
        }
    ],
}
SERVICE = FACTS | {
    "kind": "service",
    "command": "python -m loadtest.bench_service --checkpoint checkpoints/tiny",
    "settings": {"workload": {"output_tokens": 32}},
    "start_seconds": spread(3.0),
    "idle": {"worker_cpu_percent": spread(0.1), "service_cpu_percent": spread(0.3)},
    "processes": [
        {"part": "main", "rss_mb": 90.0, "threads": 3, "torch": False},
        {"part": "api", "rss_mb": 100.0, "threads": 5, "torch": False},
        {"part": "worker", "rss_mb": 400.0, "threads": 9, "torch": True},
    ],
    "levels": [
        {
            "streams": 16,
            "prompt_tokens": spread(63.0),
            "http_tokens_per_second": spread(950.0),
            "engine_tokens_per_second": spread(1000.0),
            "ratio": spread(0.9),
            "http_ttft_ms": {"p50": 20.0, "p95": 40.0, "p99": 50.0},
            "http_itl_ms": {"p50": None, "p95": None, "p99": None},
            "client_cpu_share": spread(0.05),
        }
    ],
}
FRONTEND = FACTS | {
    "kind": "frontend",
    "command": "python -m loadtest.bench_frontend --checkpoint checkpoints/tiny",
    "levels": [
        {
            "step_ms": step_ms,
            "num_streams": 64,
            "num_requests": 512,
            "num_tokens": 200,
            "tokens_per_second_on_one_core": spread(1e6 / us),
            "cpu_us_per_token": spread(us),
        }
        for step_ms, us in ((0.0, 20.0), (4.0, 50.0))
    ],
}


def test_every_figure_stands_beside_its_command() -> None:
    page = performance_page.render(ENGINE, SERVICE, FRONTEND)
    engine, service = page.index(ENGINE["command"]), page.index(SERVICE["command"])
    assert engine < page.index("| 16 | 64 | 1234 (1111–1357) | 5000 (4500–5500) |") < service
    row = "| 16 | 950 (855–1045) | 1000 (900–1100) | 0.90 (0.81–0.99) | 20.0 / 40.0 | – / – | 5 % |"
    assert service < page.index(row)
    assert "Model `tiny`, 6.6 million parameters, float32 on cpu, 2 threads." in page
    assert "Abacus, 2 cores, 24 GiB | 0.04 cores | 123 s |" in page
    assert "| worker | 400 | 9 | yes |" in page
    frontend = page.index(FRONTEND["command"])
    assert service < frontend < page.index("| instant | 64 | 20 (18–22) | 50,000 (45,000–55,000) |")
    assert frontend < page.index("| 4 | 64 | 50 (45–55) | 20,000 (18,000–22,000) |")


def test_all_promises_kept() -> None:
    made = performance_page.promises(SERVICE)
    assert len(made) == 5
    assert all(promise.kept for promise in made)
    (carried,) = performance_page.frontend_promises(FRONTEND)
    assert carried.kept
    assert "**no**" not in performance_page.render(ENGINE, SERVICE, FRONTEND)


def test_a_way_to_the_client_that_is_too_narrow_is_shown() -> None:
    broken: Any = copy.deepcopy(FRONTEND)
    broken["levels"][0]["tokens_per_second_on_one_core"] = spread(24_999.0)
    (carried,) = performance_page.frontend_promises(broken)
    assert not carried.kept
    assert performance_page.render(ENGINE, SERVICE, broken).count("**no**") == 1


@pytest.mark.parametrize(
    ("path", "value", "figure"),
    [
        (("start_seconds", "median"), 10.1, "From start"),
        (("idle", "worker_cpu_percent", "median"), 0.6, "idle worker"),
        (("processes", 1, "rss_mb"), 151.0, "resident"),
        (("processes", 1, "torch"), True, "torch"),
        (("levels", 0, "ratio", "median"), 0.89, "HTTP throughput"),
    ],
)
def test_a_broken_promise_is_shown(path: tuple[str | int, ...], value: object, figure: str) -> None:
    broken: Any = copy.deepcopy(SERVICE)
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert [figure in promise.figure for promise in performance_page.promises(broken) if not promise.kept] == [True]
    assert performance_page.render(ENGINE, broken, FRONTEND).count("**no**") == 1


def test_writing_and_checking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--results", str(tmp_path), "--page", str(tmp_path / "page.md")]
    assert performance_page.main(given) == 2
    assert "engine.json" in capsys.readouterr().err
    for name, result in (("engine", ENGINE), ("service", SERVICE), ("frontend", FRONTEND)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert performance_page.main([*given, "--check"]) == 1
    assert performance_page.main(given) == 0
    assert performance_page.main([*given, "--check"]) == 0
    (tmp_path / "page.md").write_text("16 streams: a million tokens/s")
    assert performance_page.main([*given, "--check"]) == 1


def test_the_repository_s_page_is_what_its_results_say() -> None:
    assert performance_page.main(["--check"]) == 0
