"""docs/performance.md: it is generated from JSON results, shows missed promises, and matches the repository."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.docgen import pages


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
# Another test file covers the section of this result.
LATENCY = json.loads((pages.RESULTS / "latency.json").read_text())
RESULTS: dict[str, Any] = {
    "engine": ENGINE, "service": SERVICE, "frontend": FRONTEND, "peers": PEERS, "latency": LATENCY
}  # fmt: skip
RESULTS["defaults"] = RESULTS["default_gguf"] = DEFAULTS
RESULTS["models"] = PEERS | {"cells": [], "shapes": {}}
RESULTS["models_avx2"] = RESULTS["models"] | {"command": "python -m loadtest.peers.bench_peers --shapes tiny"}
for name in ("renewed_avx2", "quantized_avx2", "prompts_avx2", "one_stream_avx2"):
    RESULTS[name] = RESULTS["models_avx2"] | {"cells": []}


def test_every_figure_follows_the_command_that_measured_it() -> None:
    page = pages.performance_page(RESULTS)
    peers, engine, service = (page.index(result["command"]) for result in (PEERS, ENGINE, SERVICE))
    assert peers < page.index("8 layers, width 512, 8/4 heads, MLP 1408, vocabulary 8,192") < engine
    row = "| 16 | 128 | 8.00 (7.20–8.80) | 2000 (1800–2200) | 56 | 1.23 | 0.50 (0.45–0.55) |"
    assert engine < page.index(row) < service
    assert engine < page.index("| 256 | 50.0 (45.0–55.0) | 5120 (4608–5632) | 5.00 | 0.25 (0.23–0.28) |") < service
    row = "| 16 | 950 (855–1045) | 1000 (900–1100) | 0.90 (0.81–0.99) | 20.0 / 40.0 | – / – | 5 % |"
    assert service < page.index(row)
    assert "Model `tiny`, 6.6 million parameters, float32 on cpu, threads: 2." in page
    assert "Abacus, 2 cores, 24 GiB | 0.04 | 123 s |" in page
    assert "| worker | 400 | 9 | yes |" in page
    frontend = page.index(FRONTEND["command"])
    assert service < frontend < page.index("| instant | 64 | 20 (18–22) | 50,000 (45,000–55,000) |")
    assert frontend < page.index("| 4 | 64 | 50 (45–55) | 20,000 (18,000–22,000) |")


def tables(peers: dict[str, Any]) -> str:
    """Return the page with this comparison with other engines."""
    return pages.performance_page(RESULTS | {"peers": peers})


def test_each_pair_has_both_speeds_and_the_aim() -> None:
    part = tables(PEERS)
    assert "| S | bfloat16 | 4 | 128 | fast | 1000 | 800 | 1.25 (1.12–1.38) | 1.2 | yes |" in part
    assert "| S | bfloat16 | 16 | 128 | fast | 1000 | 800 | 1.25 (1.12–1.38) | 1.5 | **no** |" in part
    assert "| S | bfloat16 | 16 | 128 | slow | 1000 | 500 | 2.00 (1.80–2.20) | 1.5 | yes |" in part
    assert "| S | bfloat16 | 16 | slow | 20 / 30 | 20 / 30 | 1.00 | 5 % |" in part


def test_the_page_begins_with_published_models_once_they_are_measured() -> None:
    assert "Speed on the shapes of models" not in tables(PEERS)
    cells = [cell | {"shape": shape} for shape in ("llama-3.2-1b", "qwen3-0.6b") for cell in PEERS["cells"]]
    page = pages.performance_page(RESULTS | {"models": PEERS | {"cells": cells}})
    lead = page[page.index("Speed on the shapes of models") : page.index("|  | promised |")]
    assert "| qwen3-0.6b | bfloat16 | decoding | 4 | 128 | 1000 | fast | 1.25 (1.12–1.38) | 1.2 | yes |" in lead
    assert "| S |" not in lead
    assert lead.index("qwen3-0.6b") < lead.index("llama-3.2-1b")
    decoding = page[page.index("### Decoding") :]
    assert decoding.index("qwen3-0.6b") < decoding.index("llama-3.2-1b") < decoding.index("| S |")


def test_a_processor_with_avx2_has_a_table_of_all_peers() -> None:
    page = pages.performance_page(RESULTS | {"models_avx2": RESULTS["models_avx2"] | {"cells": PEERS["cells"]}})
    part = page[page.index("## Comparison on a processor with AVX2 only") : page.index("## The engine, in-process")]
    assert RESULTS["models_avx2"]["command"] in part
    assert "| gone |  | **not available here:** no \\| compiler |" in part
    assert "| S | bfloat16 | decoding | 4 | 128 | fast | 1000 | 800 | 1.25 (1.12–1.38) | 1.2 | yes |" in part
    assert "| S | bfloat16 | decoding | 4 | 128 | slow | 1000 | 100 | 10.00 (9.00–11.00) | 1.2 | yes |" in part
    assert "| S | bfloat16 | 16 | slow | 1000 | 500 | 2.00 (1.80–2.20) | 1.5 | yes | 20 / 30 | 20 / 30 | 1.00 |" in part


def test_undisturbed_pairs_of_a_newer_comparison_replace_older_pairs() -> None:
    older = [peer_cell("decode", streams, fast=800.0) for streams in (4, 16, 64)]
    newer = [peer_cell("decode", 4, fast=500.0), peer_cell("decode", 16, late=500.0)]
    newer[1]["peers"]["fast"] = newer[1]["peers"]["late"]  # disturbed
    cells = {"models_avx2": older, "quantized_avx2": newer}
    page = pages.performance_page(RESULTS | {name: RESULTS[name] | {"cells": rows} for name, rows in cells.items()})
    part = page[page.index("## Comparison on a processor with AVX2 only") : page.index("## The engine, in-process")]
    assert "| S | bfloat16 | decoding | 4 | 128 | fast | 1000 | 500 |" in part
    assert "| S | bfloat16 | decoding | 4 | 128 | fast | 1000 | 800 |" not in part
    assert "| S | bfloat16 | decoding | 16 | 128 | fast | 1000 | 800 |" in part
    assert "| S | bfloat16 | decoding | 64 | 128 | fast | 1000 | 800 |" in part


def test_servers_without_flags_are_compared() -> None:
    part = tables(PEERS)
    assert "| S | defaults | 1 | slow | 1000 | 500.0 (450.0–550.0) | 2.00 (1.80–2.20) | 1.0 | yes |" in part
    assert "| 2.00 (1.80–2.20) |  |  |" in part  # no aim at 4 streams
    assert "| S | defaults | 16 | slow | 1000 | 500.0 (450.0–550.0) | 2.00 (1.80–2.20) | 3.0 | **no** |" in part
    assert "| S | defaults | 64 | slow | 1000 | 50.0 (45.0–55.0) | 20.00 (18.00–22.00) | 3.0 | yes |" in part
    assert "| S | defaults | 64 | slow | 20 / 30 | 20 / 30 | 1.00 | 5 % |" in part


def test_a_disturbed_figure_is_omitted_and_leaves_an_aim_open() -> None:
    cells = [peer_cell("decode", 4, fast=800.0, late=5.0), peer_cell("decode", 64, fast=800.0, late=5.0)]
    part = tables(PEERS | {"cells": [*cells, peer_cell("decode", 1, late=5.0)]})
    assert "| S | bfloat16 | 4 | 128 | fast | 1000 | 800 | 1.25 (1.12–1.38) | 1.2 | open: late † |" in part
    assert "| S | bfloat16 | 64 | 128 | fast | 1000 | 800 | 1.25 (1.12–1.38) | 1.5 | **no** |" in part
    assert "| 128 | late |" not in part
    assert "| S | bfloat16 | 1 | 128 |" not in part


def test_slower_pairs_of_both_processors_are_listed() -> None:
    slow = [peer_cell("decode", 4, fast=1250.0, slow=500.0)]
    page = pages.performance_page(RESULTS | {"models_avx2": RESULTS["models_avx2"] | {"cells": slow}, "peers": PEERS})
    part = page[page.index("### Where Kvasir is slower") : page.index("### Decoding")]
    rows = [row for row in part.splitlines() if row.startswith("| ")][2:]
    assert rows == ["| AVX2 | S | bfloat16 | decoding | 4 | 128 | fast | 0.80 (0.72–0.88) |"]
    page = pages.performance_page(RESULTS | {"peers": PEERS | {"cells": slow}})
    assert "| AVX-512, bfloat16 | S | bfloat16 | decoding | 4 | 128 | fast | 0.80 (0.72–0.88) |" in page


def test_an_unavailable_peer_is_listed_with_the_reason() -> None:
    part = tables(PEERS)
    assert "| gone |  | **not available here:** no \\| compiler |" in part
    assert "- gone failed in 4 cells: no \\| compiler" in part


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
        ("decode", "int2", 64, None),
    ],
)
def test_aims_by_kind_precision_and_streams(kind: str, precision: str, streams: int, aim: float | None) -> None:
    (pair,) = pages.compared_pairs(peer_cell(kind, streams, slow=500.0) | {"precision": precision})
    assert pair["aim"] == ("" if aim is None else f"{aim:.1f}")


@pytest.mark.parametrize(("kind", "streams", "aim"), [("decode", 16, "3.5"), ("prompt", 1, "3.0")])
def test_in_4_bits_each_peer_has_an_aim_of_its_own(kind: str, streams: int, aim: str) -> None:
    rates = {"llama.cpp": 500.0, "fast": 800.0, "late": 500.0}
    pairs = pages.compared_pairs(peer_cell(kind, streams, **rates) | {"precision": "q4_k_m"})
    assert [(pair["peer"], pair["aim"], pair["reached"]) for pair in pairs] == [
        ("llama.cpp", aim, "**no**"),
        ("fast", "1.1", "yes"),
    ]


def goals(results: dict[str, Any], kind: str) -> dict[str, tuple[str, bool]]:
    """Return the measured figure of each promise or aim on the page, and whether the page calls the goal reached."""
    page = pages.performance_page(results)
    rows = page[page.index(f"|  | {kind} |") :].partition("\n\n")[0].splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in rows]
    return {figure: (measured, {"yes": True, "**no**": False}[verdict]) for figure, _, measured, verdict in cells}


def missed(results: dict[str, Any], kind: str) -> dict[str, str]:
    """Return the measured figure of each promise or aim that the page calls missed."""
    return {figure: measured for figure, (measured, is_reached) in goals(results, kind).items() if not is_reached}


def test_kept_promises_are_shown_as_kept() -> None:
    assert len(goals(RESULTS, "promised")) == 6
    assert missed(RESULTS, "promised") == {}


def test_a_slow_api_process_breaks_a_promise() -> None:
    broken: Any = copy.deepcopy(FRONTEND)
    broken["levels"][0]["tokens_per_second_on_one_core"] = spread(24_999.0)
    assert len(missed(RESULTS | {"frontend": broken}, "promised")) == 1


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
    (promise,) = missed(RESULTS | {"service": broken}, "promised")
    assert figure in promise


def results_at(**changes: float) -> dict[str, Any]:
    """Return results that just reach every aim, except for the given changes."""
    at = {"http": 0.95, "cpu": 30.0, "steps": 2.0, "itl": 2.0, "ttft": 0.5}
    at |= changes
    made: Any = copy.deepcopy(RESULTS)
    made["service"]["levels"][0]["ratio"] = spread(at["http"])
    made["frontend"]["levels"][1]["cpu_us_per_token"] = spread(at["cpu"])
    made["latency"]["short"]["steps"] = spread(at["steps"])
    for point in made["latency"]["long"]["points"]:
        point["itl_p99_ratio"] = spread(9.0 if point["prompt_slowdown"] is None else at["itl"])
    made["peers"]["cells"] = [peer_cell("http", 16, fast=800.0), peer_cell("decode", 16, fast=800.0)]
    made["peers"]["cells"][0]["peers"]["fast"]["theirs"]["ttft_p99_ms"] = spread(30.0 / at["ttft"])
    return made


def test_a_median_at_the_limit_reaches_the_aim() -> None:
    assert missed(results_at(), "aim") == {}
    assert len(goals(results_at(), "aim")) == 5


@pytest.mark.parametrize(
    ("part", "value", "figure", "measured"),
    [
        ("http", 0.94, "HTTP throughput at 16 streams", "0.94 (0.85–1.03)"),
        ("cpu", 31.0, "64 streams, a step every 4 ms", "31 (28–34) µs"),
        ("steps", 3.0, "while 63 streams decode", "3 steps"),
        ("itl", 2.1, "ITL p99 by a prompt of 4,096 tokens", "2.10 (1.89–2.31)"),
        ("ttft", 0.6, "TTFT p99 at 16 and 64 streams", "0.60 to 0.60; reached in 0 of 1"),
    ],
)
def test_a_missed_aim_is_reported(part: str, value: float, figure: str, measured: str) -> None:
    ((aim, found),) = missed(results_at(**{part: value}), "aim").items()
    assert figure in aim
    assert found == measured


def test_without_compared_servers_there_is_no_ttft_aim() -> None:
    made = results_at()
    made["peers"]["cells"] = []
    assert not any("TTFT p99" in aim for aim in goals(made, "aim"))


def test_page_and_pictures_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--results", str(tmp_path), "--docs", str(tmp_path)]
    assert pages.main(given) == 2
    assert "engine.json" in capsys.readouterr().err
    for name, result in RESULTS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert pages.main([*given, "--check"]) == 1
    assert pages.main(given) == 0
    assert pages.main([*given, "--check"]) == 0
    (tmp_path / "performance.md").write_text("16 streams: a million tokens/s")
    assert pages.main([*given, "--check"]) == 1
    assert pages.main(given) == 0
    (tmp_path / "peers.json").write_text(json.dumps(PEERS | {"date": "another day"}))
    capsys.readouterr()
    assert pages.main([*given, "--check"]) == 1
    assert "performance-peers.png does not match" in capsys.readouterr().err


def test_the_repositorys_page_matches_its_results() -> None:
    assert pages.main(["--check"]) == 0
