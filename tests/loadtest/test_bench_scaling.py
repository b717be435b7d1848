"""How things scale: the arithmetic of fits, checkpoints of a size, and each measurement on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.docgen.performance_page import NAMES, RESULTS, render
from loadtest.docgen.pictures import draw_scaling
from loadtest.inprocess.engine import InProcess
from loadtest.measurement import roofline
from loadtest.measurement.provenance import shows
from loadtest.measurement.spread import spread
from loadtest.scenarios import bench_scaling, scaling_engine
from loadtest.scenarios.bench_scaling import config_of, growth
from loadtest.scenarios.scaling_engine import Prefixes, Steps, fits, kv_memory
from model.checkpoint.manifest import read_manifest
from service.config.settings import ServeSettings, read_settings


def test_the_fits_of_a_power_law_and_of_a_line() -> None:
    law = fits([1, 2, 8, 4], [3 * x**1.5 for x in (1, 2, 8, 4)])["power"]
    assert law == pytest.approx({"exponent": 1.5, "factor": 3.0, "last": 1.5})
    xs = [1, 10, 100, 1000]
    found = fits(xs, [5 + 0.1 * x for x in xs])
    assert found["line"] == pytest.approx({"fixed": 5.0, "each": 0.1})
    assert found["power"]["exponent"] < found["power"]["last"] < 1


@pytest.mark.parametrize(
    ("xs", "ys", "complaint"),
    [([1], [1], "at least two points"), ([2, 2], [1, 3], "at least two points"), ([1, 2], [0, 1], "positive values")],
)
def test_points_without_a_fit_are_rejected(xs: list[float], ys: list[float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        fits(xs, ys)


@pytest.mark.parametrize("megabytes", [100, 300, 1000])
def test_a_checkpoint_is_nearly_as_large_as_was_asked_for(megabytes: int) -> None:
    size = 4 * config_of(megabytes * 10**6).num_parameters
    assert size == pytest.approx(megabytes * 10**6, rel=0.25)


def test_sizes_with_the_same_number_of_layers_are_rejected(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_scaling.main(["--checkpoint", str(checkpoint), "--sizes", "60", "70"])
    assert "same number of layers" in capsys.readouterr().err


def start_point(gigabytes: float) -> dict[str, Any]:
    """Starts of 2 s and 3 s a GB, read at 4 GB/s from memory and 1 GB/s from the disk."""
    start, reads = 2 + 3 * gigabytes, {"warm": gigabytes / 4, "cold": gigabytes}
    return {
        "bytes": int(1e9 * gigabytes),
        **{
            kind: {"start_seconds": spread([start]), "read_seconds": spread([read]), "ratio": spread([start / read])}
            for kind, read in reads.items()
        },
    }


def test_what_a_gb_more_costs() -> None:
    told = growth([start_point(size) for size in (0.1, 0.5, 1.0)])
    assert told["warm"]["start"]["line"] == pytest.approx({"fixed": 2.0, "each": 3.0})
    assert (told["warm"]["marginal"], told["cold"]["marginal"]) == pytest.approx((12.0, 3.0))


@pytest.fixture
def contestant(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> InProcess:
    monkeypatch.setattr(roofline, "_READ_BYTES", 2**16)
    monkeypatch.setattr(roofline, "_SIDES", (64,))
    flags = ["--checkpoint", str(checkpoint), "--threads", "1", "--attention", "sdpa", "--kv-cache-memory", "16"]
    return InProcess.open(read_settings(ServeSettings, flags, command="serve", summary=""))


def measured(contestant: InProcess, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every part on a tiny model, but for real starts."""
    monkeypatch.setattr(scaling_engine, "_STEPS", 4)
    steps = Steps(contestant, (1, 2, 4), (32, 48, 64))
    prefixes = Prefixes(contestant, 96, (0, 32, 80))
    for _ in range(2):
        steps.round()
        prefixes.round()
    starts = [start_point(size) for size in (0.1, 1.0)]
    return {
        "command": "python -m loadtest.scenarios.bench_scaling",
        "model": contestant.facts,
        "steps": steps.to_dict(),
        "kv_memory": kv_memory(contestant.manifest.config, "float32", (65_536, 131_072)),
        "prefixes": prefixes.to_dict(),
        "starts": {"points": starts, **growth(starts)},
    }


def test_what_is_measured_and_how_it_is_told(
    contestant: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = measured(contestant, monkeypatch)
    assert [point["batch_size"] for point in result["steps"]["over_batch"]["points"]] == [1, 2, 4]
    assert [point["context_length"] for point in result["steps"]["over_context"]["points"]] == [32, 48, 64]
    assert [(p["hits"], p["rest_tokens"]) for p in result["prefixes"]["points"]] == [(0, 96), (32, 64), (80, 16)]
    assert all(len(point["ttft_ms"]["values"]) == 2 for point in result["prefixes"]["points"])
    each = read_manifest(contestant.settings.checkpoint).config.kv_bytes_per_token(4)
    assert [point["formula"] for point in result["kv_memory"]["points"]] == [65_536 * each, 131_072 * each]

    others = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    page = render({**{name: others[name] for name in NAMES}, "scaling": others["scaling"] | result})
    assert "![step time, KV-cache memory, TTFT and start time, each over its size](scaling.png)" in page
    assert "The largest checkpoint starts within 1.3 times its read: **no**." in page
    assert "With warm files a start takes 2.00 s plus 3.00 s per GB; a read takes 0.25 s per GB." in page
    assert "| 80 | 80 | 16 |" in page

    picture = tmp_path / "scaling.png"
    draw_scaling(picture, result)
    assert shows(picture, result)
    assert not shows(picture, {**result, "command": "another"})
