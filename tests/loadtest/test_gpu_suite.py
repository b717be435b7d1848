"""The GPU suite without a GPU: the script with stub parts, the JSON report, and small measurements."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.gpu import bench_gpu, report
from loadtest.gpu.bench_gpu import QWEN2, GpuBench, attention, card, decode, engine, quantized
from model.config import ModelConfig

SCRIPT = Path(__file__).parents[2] / "loadtest" / "gpu" / "suite.sh"
PARTS = [
    "card",
    "paged",
    "decode",
    "engine",
    "quantized",
    "engine_tests",
    "attention",
    "mechanisms",
    "training",
]
# Parts that pass, fail, are cut short, and leave incomplete JSON.
STAND_IN = """#!/bin/sh
out() {{ while [ "$1" != --out ]; do shift; done; echo "$2"; }}
case "$*" in
    *loadtest.gpu.report*) exec {python} "$@" ;;
    *"bench_gpu card"*) echo '{{"name": "a card"}}' >"$(out "$@")" ;;
    *"bench_gpu decode"*) echo "out of memory"; exit 3 ;;
    *"bench_gpu engine"*) exit 124 ;;
    *"bench_gpu attention"*) echo '{{"rows": [' >"$(out "$@")"; exit 137 ;;
    *pip*) exit 0 ;;
    *"import sys, torch"*) exit {no_gpu} ;;
esac
"""


def run(tmp_path: Path, *, no_gpu: int = 1, budget: int = 500, wheels: bool = False) -> dict[str, Any]:
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, no_gpu=no_gpu))
    python.chmod(0o755)
    out = tmp_path / "results" / "gpu.json"
    arguments = [str(SCRIPT), str(out), *([str(tmp_path)] if wheels else [])]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "BUDGET": str(budget)}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(out.parent.iterdir()) == [out]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_the_report_has_every_part_even_if_others_fail(tmp_path: Path) -> None:
    parts = run(tmp_path)["parts"]
    assert list(parts) == PARTS
    assert (parts["card"]["state"], parts["card"]["result"]) == ("passed", {"name": "a card"})
    assert (parts["decode"]["state"], parts["decode"]["code"]) == ("failed", 3)
    assert parts["decode"]["end_of_log"] == "out of memory\n"
    assert parts["engine"]["state"] == parts["attention"]["state"] == "cut short"
    assert "result" not in parts["attention"]
    assert {parts[name]["state"] for name in ("paged", "engine_tests", "mechanisms", "training")} == {"absent"}


def test_with_a_gpu_tests_run_after_the_wheels(tmp_path: Path) -> None:
    parts = run(tmp_path, no_gpu=0, wheels=True)["parts"]
    assert list(parts) == ["wheels", *PARTS]
    assert {parts[name]["state"] for name in ("wheels", "paged", "engine_tests", "mechanisms", "training")} == {
        "passed"
    }


def test_without_time_every_part_is_reported_as_cut_short(tmp_path: Path) -> None:
    parts = run(tmp_path, budget=0)["parts"]
    assert [part["state"] for part in parts.values()] == ["cut short"] * len(PARTS)
    assert parts["card"]["end_of_log"] == "no time left\n"


def test_the_default_budget_is_under_ten_minutes() -> None:
    """Each part is cut at the budget, which leaves room for the start of a GPU machine."""
    text = SCRIPT.read_text()
    assert "budget=${BUDGET:-530}" in text
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"]])
def test_wrong_arguments_print_the_usage(arguments: list[str]) -> None:
    done = subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "loadtest/gpu/suite.sh OUT.json [WHEELS]" in done.stderr


def test_a_repeated_part_replaces_the_earlier_report() -> None:
    first = report.add_part({}, "a", code=1, seconds=2.0, log="x" * 9000, result=None)
    both = report.add_part(first, "b", code=0, seconds=1.0, log="", result={"absent": "no CUDA device"})
    assert len(both["parts"]["a"]["end_of_log"]) == 4000
    assert both["parts"]["b"]["state"] == "absent"
    last = report.add_part(both, "a", code=0, seconds=3.0, log="", result={"n": 1})
    assert (last["parts"]["a"]["state"], last["parts"]["a"]["result"]) == ("passed", {"n": 1})


def test_a_part_without_a_device_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_gpu.main(["decode", "--out", str(tmp_path / "decode.json")]) == 0
    found = json.loads((tmp_path / "decode.json").read_text())
    assert found["absent"] == "no CUDA device"
    assert found["command"].startswith("python -m loadtest.gpu.bench_gpu decode")


TINY = {"vocab_size": 300, "max_context_length": 64, "num_layers": 2, "hidden_size": 64, "mlp_size": 96}
BENCH = GpuBench(
    device=torch.device("cpu"),
    dtype=torch.float32,
    shape=ModelConfig.from_dict({**QWEN2, **TINY, "num_heads": 4, "head_dim": 16}),
    batches=(1, 5),
    context=40,
    attention=((4, 2, 16),),
    attention_contexts=(40,),
    probe_bytes=2**20,
    probe_side=64,
    output=16,
    streams=(1, 3),
    repeats=2,
)


def test_the_large_model_has_the_sizes_of_qwen2() -> None:
    shape = ModelConfig.from_dict(dict(QWEN2))
    assert shape.num_parameters == 1_543_714_304  # those of the published checkpoint of 1.5B
    assert shape.kv_bytes_per_token(2) == 28_672


def test_card_reports_limits_and_attention_kernels() -> None:
    found = card(BENCH)
    assert found["attention"] == "paged (decode: gathered, prompts: one by one)"
    assert len(found["left_out"]) == 2
    assert found["bytes_per_second"] > 0


def test_attention_measures_every_available_kernel() -> None:
    first, second = attention(BENCH)["rows"]
    assert (first["batch"], second["batch"], first["heads"]) == (1, 5, (4, 2, 16))
    assert "absent" in first["triton"]
    assert first["gathered"]["bytes_per_second"] > 0


def test_decode_measures_steps_with_and_without_graphs() -> None:
    found = decode(BENCH)
    assert [row["batch"] for row in found["rows"]] == [1, 5]
    assert all(row["same_tokens"] for row in found["rows"])
    assert found["recorded"] == [[8, 3], [4, 3]]
    for row in found["rows"]:
        assert row["of_the_bound"] == pytest.approx(row["bound_ms"] / row["ms"])
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["ms"])
    assert found["kernels"][0]["most"][0]["us_a_step"] > 0


def test_quantized_measures_int8_and_reports_fp8_as_absent() -> None:
    found = quantized(BENCH)
    assert found["int8"]["matrices"] == "int8 matrices by torch._int_mm"
    whole = {row["batch"]: row["bound_ms"] for row in decode(BENCH)["rows"]}
    assert {row["batch"] for row in found["int8"]["rows"]} == set(whole)
    assert all(row["same_tokens"] for row in found["int8"]["rows"])
    assert found["fp8"] == {"absent": "--quantize fp8 needs --dtype bfloat16; add it, or choose --quantize int8"}


def test_engine_measures_each_number_of_streams(tiny_checkpoint: Path) -> None:
    threads = torch.get_num_threads()
    found = engine(BENCH, tiny_checkpoint)
    torch.set_num_threads(threads)
    assert [row["streams"] for row in found["rows"]] == [1, 3]
    assert all(len(row["values"]) == 3 for row in found["rows"])
