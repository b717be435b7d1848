"""docs/performance.md: tables from JSON alone, missed promises shown, equal to the results in the repository."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.docgen import performance_page


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
    "settings": {"steps": 32},
    "roofline": {
        "weights": "float32",
        "gb_per_second": spread(33.0),
        "gflops": spread(200.0),
    },
    "decode": [
        {
            "batch_size": batch,
            "context_length": 128,
            "bytes": 56_000_000,
            "flops": 1_234_000_000,
            "step_ms": spread(8.0),
            "tokens_per_second": spread(125.0 * batch),
            "of_the_roofline": spread(0.5),
        }
        for batch in (4, 16)
    ],
    "prompts": [
        {
            "prompt_tokens": 256,
            "bytes": 1,
            "flops": 5_000_000_000,
            "ttft_ms": spread(50.0),
            "tokens_per_second": spread(5120.0),
            "of_the_roofline": spread(0.25),
        }
    ],
}
SERVICE = FACTS | {
    "kind": "service",
    "command": "python -m loadtest.scenarios.bench_service --checkpoint checkpoints/tiny",
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
    "command": "python -m loadtest.scenarios.bench_frontend --checkpoint checkpoints/tiny",
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


def peer_cell(kind: str, streams: int, **peers: float) -> dict[str, Any]:
    """Return a cell in which Kvasir makes 1000 tokens/s, and each peer the given tokens/s."""
    further = {"ttft_p50_ms": spread(20.0), "ttft_p99_ms": spread(30.0), "client_cpu_share": spread(0.05)}
    figures: dict[str, Any] = {
        name: {
            "ours": {"tokens_per_second": spread(1000.0)} | (further if kind == "http" else {}),
            "theirs": {"tokens_per_second": spread(rate)} | (further if kind == "http" else {}),
            "ratio": spread(1000.0 / rate),
            "other_work_cores": [0.1, 0.3 if name == "late" else 0.0],
            "processors_share": [0.9, 1.0],
        }
        for name, rate in peers.items()
    }
    return {
        "shape": "S",
        "precision": "bfloat16",
        "kind": kind,
        "streams": streams,
        "prompt_tokens": 64,
        "output_tokens": 128,
        "context_length": 128,
        "peers": figures | {"gone": {"error": "no | compiler"}},
    }


SIZES = {"num_layers": 8, "hidden_size": 512, "num_heads": 8, "num_kv_heads": 4, "mlp_size": 1408, "vocab_size": 8192}
PEERS = FACTS | {
    "kind": "peers",
    "command": "python -m loadtest.peers.bench_peers",
    "settings": {"threads": 2, "rounds": 3},
    "shapes": {"S": SIZES},
    "peers": {
        "fast": {"note": "in batches", "pins": ["fast==1.0"], "unavailable": None},
        "slow": {"note": "alone", "pins": ["slow==2.0"], "unavailable": None},
        "gone": {"note": "?", "pins": [], "unavailable": "no | compiler"},
    },
    "cells": [
        peer_cell("decode", 4, fast=800.0, slow=100.0),
        peer_cell("decode", 16, fast=800.0),
        peer_cell("http", 16, slow=500.0),
        peer_cell("decode", 64),
    ],
}
DEFAULTS = FACTS | {
    "kind": "peers",
    "command": "python -m loadtest.peers.bench_peers --precisions defaults",
    "settings": {"threads": 2, "rounds": 1},
    "shapes": {"S": SIZES},
    "cells": [
        peer_cell("http", streams, slow=rate) | {"precision": "defaults"}
        for streams, rate in ((1, 500.0), (4, 500.0), (16, 500.0), (64, 50.0))
    ],
}
# Other test files cover the sections of these results.
OTHERS = {
    name: json.loads((performance_page.RESULTS / f"{name}.json").read_text())
    for name in ("kernels", "latency", "scaling")
}
RESULTS: dict[str, Any] = {"engine": ENGINE, "service": SERVICE, "frontend": FRONTEND, "peers": PEERS} | OTHERS
RESULTS["defaults"] = DEFAULTS


def test_every_figure_follows_the_command_that_measured_it() -> None:
    page = performance_page.render(RESULTS)
    peers, engine, service = (page.index(result["command"]) for result in (PEERS, ENGINE, SERVICE))
    assert peers < page.index("8 layers, width 512, 8/4 heads, MLP 1408, vocabulary 8,192") < engine
    row = "| 16 | 128 | 8.00 (7.20–8.80) | 2000 (1800–2200) | 56 | 1.23 | 0.50 (0.45–0.55) |"
    assert engine < page.index(row) < service
    assert engine < page.index("| 256 | 50.0 (45.0–55.0) | 5120 (4608–5632) | 5.00 | 0.25 (0.23–0.28) |") < service
    row = "| 16 | 950 (855–1045) | 1000 (900–1100) | 0.90 (0.81–0.99) | 20.0 / 40.0 | – / – | 5 % |"
    assert service < page.index(row)
    assert "Model `tiny`, 6.6 million parameters, float32 on cpu, 2 threads." in page
    assert "Abacus, 2 cores, 24 GiB | 0.04 cores | 123 s |" in page
    assert "| worker | 400 | 9 | yes |" in page
    frontend = page.index(FRONTEND["command"])
    assert service < frontend < page.index("| instant | 64 | 20 (18–22) | 50,000 (45,000–55,000) |")
    assert frontend < page.index("| 4 | 64 | 50 (45–55) | 20,000 (18,000–22,000) |")


def tables(peers: dict[str, Any]) -> str:
    """Return all tables of the comparison with other engines."""
    return "".join(map(str, performance_page.peers_tables(peers, DEFAULTS).values()))


def test_the_fastest_peer_of_each_cell_is_compared() -> None:
    part = tables(PEERS)
    assert "| S | bfloat16 | decoding | 4 | 128 | fast | 1.25 (1.12–1.38) | 1.2 | yes |" in part
    assert "| S | bfloat16 | decoding | 16 | 128 | fast | 1.25 (1.12–1.38) | 1.5 | **no** |" in part
    assert "| S | bfloat16 | HTTP, streaming | 16 | 128 | slow | 2.00 (1.80–2.20) | 1.5 | yes |" in part
    assert "| S | bfloat16 | 16 | 128 | 1000 (1000–1000) | 800; 1.25 (1.12–1.38) |  |  |" in part
    assert "| S | bfloat16 | 16 | slow | 20 / 30 | 20 / 30 | 1.00 | 5 % |" in part


def test_servers_without_flags_are_compared() -> None:
    part = tables(PEERS)
    assert "| S | 1 | slow | 1000 (1000–1000) | 500.0 (450.0–550.0) | 2.00 (1.80–2.20) | 1.0 | yes |" in part
    assert "| 2.00 (1.80–2.20) |  |  |" in part  # no aim at 4 streams
    assert "| S | 16 | slow | 1000 (1000–1000) | 500.0 (450.0–550.0) | 2.00 (1.80–2.20) | 3.0 | **no** |" in part
    assert "| S | 64 | slow | 1000 (1000–1000) | 50.0 (45.0–55.0) | 20.00 (18.00–22.00) | 3.0 | yes |" in part
    assert "| S | defaults | 64 | slow | 20 / 30 | 20 / 30 | 1.00 | 5 % |" in part


def test_a_disturbed_figure_is_omitted_and_leaves_an_aim_open() -> None:
    cells = [peer_cell("decode", 4, fast=800.0, late=5.0), peer_cell("decode", 64, fast=800.0, late=5.0)]
    part = tables(PEERS | {"cells": [*cells, peer_cell("decode", 1, late=5.0)]})
    assert "| 4 | 128 | fast | 1.25 (1.12–1.38) | 1.2 | open: late † |" in part
    assert "| 64 | 128 | fast | 1.25 (1.12–1.38) | 1.5 | **no** |" in part
    assert "| S | bfloat16 | 4 | 128 | 1000 (1000–1000) | 800; 1.25 (1.12–1.38) | † |" in part
    assert "| S | bfloat16 | decoding | 1 |" not in part


def test_an_unavailable_peer_is_listed_with_the_reason() -> None:
    part = tables(PEERS)
    assert "| gone |  | **not available here:** no \\| compiler |" in part
    assert "| gone | 4 | no \\| compiler |" in part


@pytest.mark.parametrize(
    ("kind", "precision", "streams", "aim"),
    [
        ("decode", "bfloat16", 64, 1.5),
        ("decode", "int8", 64, 1.3),
        ("decode", "float32", 64, 1.0),
        ("prompt", "int8", 1, 1.0),
        ("http", "int8", 64, 1.5),
        ("http", "int8", 1, None),
        ("http", "defaults", 1, 1.0),
        ("http", "defaults", 4, None),
        ("http", "defaults", 64, 3.0),
    ],
)
def test_aims_by_kind_precision_and_streams(kind: str, precision: str, streams: int, aim: float | None) -> None:
    assert performance_page.aim({"kind": kind, "precision": precision, "streams": streams}) == aim


def test_all_promises_kept() -> None:
    made = list(performance_page.promises(SERVICE, FRONTEND))
    assert len(made) == 6
    assert all(promise.is_reached for promise in made)
    assert unkept(RESULTS) == 0


def test_a_slow_api_process_breaks_a_promise() -> None:
    broken: Any = copy.deepcopy(FRONTEND)
    broken["levels"][0]["tokens_per_second_on_one_core"] = spread(24_999.0)
    assert [goal.is_reached for goal in performance_page.promises(SERVICE, broken)] == [True] * 5 + [False]
    assert unkept(RESULTS | {"frontend": broken}) == 1


def unkept(results: dict[str, Any]) -> int:
    """Return the number of promises that the page reports as not kept."""
    page = performance_page.render(results)
    return page[: page.index("The next table lists aims")].count("**no**")


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
    made = performance_page.promises(broken, FRONTEND)
    assert [figure in promise.figure for promise in made if not promise.is_reached] == [True]
    assert unkept(RESULTS | {"service": broken}) == 1


def test_page_and_pictures_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--results", str(tmp_path), "--page", str(tmp_path / "page.md")]
    assert performance_page.main(given) == 2
    assert "engine.json" in capsys.readouterr().err
    for name, result in RESULTS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert performance_page.main([*given, "--check"]) == 1
    assert performance_page.main(given) == 0
    assert performance_page.main([*given, "--check"]) == 0
    (tmp_path / "page.md").write_text("16 streams: a million tokens/s")
    assert performance_page.main([*given, "--check"]) == 1
    assert performance_page.main(given) == 0
    (tmp_path / "peers.json").write_text(json.dumps(PEERS | {"date": "another day"}))
    capsys.readouterr()
    assert performance_page.main([*given, "--check"]) == 1
    stale = capsys.readouterr().err
    assert "performance-peers.png does not match" in stale
    assert "performance-engine.png" not in stale


def test_the_repositorys_page_matches_its_results() -> None:
    assert performance_page.main(["--check"]) == 0
