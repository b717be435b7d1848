"""Benchmark of the native attention kernel against PyTorch's and against memory reads."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from loadtest.inprocess import bench_kernels
from loadtest.measurement import benchmark_program
from model.kernels.build import BuildError
from tests.model.kernel_libraries import BUILDABLE, library_of

ASKED = ["--shape", "S", "--batch", "2", "--context", "48", "--repeats", "2", "--threads", "1"]


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "_COLD_BYTES", 1)
    monkeypatch.setattr(bench_kernels, "_READ_BYTES", 2**20)
    monkeypatch.setattr(benchmark_program, "measure_other_work", lambda _: 0.0)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


@pytest.mark.parametrize("level", list(BUILDABLE)[:1])
def test_both_backends_are_timed_in_turn(
    level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_kernels, "load_kernels", lambda cache: library_of(level))
    out = tmp_path / "kernels.json"
    assert bench_kernels.main([*ASKED, "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    (row,) = written["rows"]
    assert row["case"] == "S bfloat16 B2 T48"
    assert row["case"] in capsys.readouterr().out
    for first, second in zip(row["sdpa_us"]["values"], row["native_us"]["values"], strict=True):
        assert first / second in [pytest.approx(ratio) for ratio in row["times_sdpa"]["values"]]
    assert (written["level"], written["threads"]) == (level, 1)
    assert written["command"].startswith("python -m loadtest.inprocess.bench_kernels --shape S")


def test_missing_kernels_end_in_one_line_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_kernels, "load_kernels", Mock(side_effect=BuildError("no C++ compiler")))
    assert bench_kernels.main(ASKED) == 1
    assert capsys.readouterr().err == "python -m loadtest.inprocess.bench_kernels: no C++ compiler\n"
