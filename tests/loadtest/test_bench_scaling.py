"""bench_scaling: the fits, the temporary checkpoints, and one run on a tiny model without real starts."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtest.docgen.pages import NAMES, RESULTS, performance_page
from loadtest.docgen.pictures import draw_scaling
from loadtest.measurement.benchmark_program import is_picture_of
from loadtest.scenarios import bench_scaling
from loadtest.scenarios.bench_scaling import fits
from model.checkpoint.manifest import read_manifest


def test_fits_recover_a_power_law_and_a_line() -> None:
    law = fits([1, 2, 8, 4], [3 * x**1.5 for x in (1, 2, 8, 4)])["power"]
    assert law == pytest.approx({"exponent": 1.5, "factor": 3.0, "last": 1.5})
    xs = [1, 10, 100, 1000]
    found = fits(xs, [5 + 0.1 * x for x in xs])
    assert found["line"] == pytest.approx({"fixed": 5.0, "each": 0.1})
    assert found["power"]["exponent"] < found["power"]["last"] < 1


def test_a_run_writes_every_sweep_and_the_page_shows_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(directory: Path, serve: Sequence[str]) -> float:
        """Return 2 s plus 3 s per GB, in place of a real start."""
        return 2 + 3e-9 * sum(path.stat().st_size for path in directory.glob("*.safetensors"))

    def write(directory: Path, shape: str) -> Path:
        """Write a file of `shape` bytes, in place of a checkpoint."""
        (directory / "model.safetensors").write_bytes(bytes(int(shape)))
        return directory

    small = {
        "_STEPS": 4,
        "_BATCHES": (1, 2, 4),
        "_BATCH": 2,
        "_CONTEXTS": (32, 48, 64),
        "_CONTEXT": 48,
        "_PROMPT": 96,
        "_SHARED": (0, 32, 80),
    }
    small |= {"_KV_TOKENS": (65_536, 131_072), "write_random_checkpoint": write, "measure_start": start}
    for name, value in small.items():
        monkeypatch.setattr(bench_scaling, name, value)
    out = tmp_path / "scaling.json"
    flags = ["--checkpoint", str(checkpoint), "--out", str(out), "--repeats", "2", "--start-repeats", "1"]
    flags += ["--shapes", "20_000_000", "80_000_000", "--", "--threads", "1", "--kv-cache-memory", "16"]
    assert bench_scaling.main(flags) == 0
    result = json.loads(out.read_text())
    assert [point["batch_size"] for point in result["steps"]["over_batch"]["points"]] == [1, 2, 4]
    assert [point["context_length"] for point in result["steps"]["over_context"]["points"]] == [32, 48, 64]
    assert [(p["hits"], p["rest_tokens"]) for p in result["prefixes"]["points"]] == [(0, 96), (32, 64), (80, 16)]
    assert all(len(point["ttft_ms"]["values"]) == 2 for point in result["prefixes"]["points"])
    dtype_bytes = 2 if result["model"]["kv_cache_dtype"] in ("bfloat16", "float16") else 4
    each = read_manifest(checkpoint).config.kv_bytes_per_token(dtype_bytes)
    assert [point["formula"] for point in result["kv_memory"]["points"]] == [65_536 * each, 131_072 * each]
    assert [point["bytes"] for point in result["starts"]["points"]] == [20_000_000, 80_000_000]
    assert result["starts"]["warm"]["start"]["line"] == pytest.approx({"fixed": 2.0, "each": 3.0})

    others = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in NAMES}
    page = performance_page(others | {"scaling": result})
    assert "With warm files a start takes 2.00 s plus 3.00 s per GB" in page
    assert "| 80 | 80 | 16 |" in page
    picture = tmp_path / "scaling.png"
    draw_scaling(picture, result)
    assert is_picture_of(picture, result)
    assert not is_picture_of(picture, {**result, "command": "another"})
