"""The GPU suite without a GPU: its script with stand-ins for its parts, its one JSON, and its measurements in small."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.gpu import bench_gpu, report
from loadtest.gpu.bench_setting import full, tiny
from loadtest.gpu.measurements import attention, card, decode, engine, quantized

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
# A part that works, one that fails, one that is cut short, and one that leaves half of its JSON.
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


def test_every_part_is_told_of_whatever_became_of_the_others(tmp_path: Path) -> None:
    parts = run(tmp_path)["parts"]
    assert list(parts) == PARTS
    assert (parts["card"]["state"], parts["card"]["result"]) == ("passed", {"name": "a card"})
    assert (parts["decode"]["state"], parts["decode"]["code"]) == ("failed", 3)
    assert parts["decode"]["end_of_log"] == "out of memory\n"
    assert parts["engine"]["state"] == parts["attention"]["state"] == "cut short"
    assert "result" not in parts["attention"]
    assert {parts[name]["state"] for name in ("paged", "engine_tests", "mechanisms", "training")} == {"absent"}


def test_with_a_gpu_tests_run_and_wheels_come_first(tmp_path: Path) -> None:
    parts = run(tmp_path, no_gpu=0, wheels=True)["parts"]
    assert list(parts) == ["wheels", *PARTS]
    assert {parts[name]["state"] for name in ("wheels", "paged", "engine_tests", "mechanisms", "training")} == {
        "passed"
    }


def test_without_time_nothing_runs_and_that_is_told(tmp_path: Path) -> None:
    parts = run(tmp_path, budget=0)["parts"]
    assert [part["state"] for part in parts.values()] == ["cut short"] * len(PARTS)
    assert parts["card"]["end_of_log"] == "no time left\n"


def test_the_parts_have_time_enough_and_no_more_than_a_loan_of_ten_minutes() -> None:
    """What every part may take is cut at the budget, which leaves room for the machine's start."""
    text = SCRIPT.read_text()
    assert "budget=${BUDGET:-530}" in text
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"]])
def test_wrong_arguments_are_told_what_the_script_is(arguments: list[str]) -> None:
    done = subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "loadtest/gpu/suite.sh OUT.json [WHEELS]" in done.stderr


def test_a_part_told_again_takes_the_place_of_the_first() -> None:
    first = report.add_part({}, "a", code=1, seconds=2.0, log="x" * 9000, result=None)
    both = report.add_part(first, "b", code=0, seconds=1.0, log="", result={"absent": "no CUDA device"})
    assert len(both["parts"]["a"]["end_of_log"]) == 4000
    assert both["parts"]["b"]["state"] == "absent"
    last = report.add_part(both, "a", code=0, seconds=3.0, log="", result={"n": 1})
    assert (last["parts"]["a"]["state"], last["parts"]["a"]["result"]) == ("passed", {"n": 1})


def test_without_a_device_a_part_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_gpu.main(["decode", "--out", str(tmp_path / "decode.json")]) == 0
    told = json.loads((tmp_path / "decode.json").read_text())
    assert told["absent"] == "no CUDA device"
    assert told["command"].startswith("python -m loadtest.gpu.bench_gpu decode")


BENCH = tiny(torch.device("cpu"))


def test_the_large_model_is_qwen2s() -> None:
    bench = full(torch.device("cpu"))
    assert bench.shape.num_parameters == 1_543_714_304  # what its checkpoint of 1.5B holds
    assert bench.shape.kv_bytes_per_token(2) == 28_672


def test_the_card_and_its_ways_of_attention() -> None:
    told = card(BENCH)
    assert told["attention"] == "paged (decode: gathered, prompts: one by one)"
    assert len(told["left_out"]) == 2
    assert told["bytes_per_second"] > 0


def test_attention_in_small() -> None:
    first, second = attention(BENCH)["rows"]
    assert (first["batch"], second["batch"], first["heads"]) == (1, 5, (4, 2, 16))
    assert "absent" in first["triton"]
    assert first["gathered"]["bytes_per_second"] > 0


def test_decode_steps_in_small() -> None:
    told = decode(BENCH)
    assert [row["batch"] for row in told["rows"]] == [1, 5]
    assert all(row["same_tokens"] for row in told["rows"])
    assert told["recorded"] == [[8, 3], [4, 3]]
    for row in told["rows"]:
        assert row["of_the_bound"] == pytest.approx(row["bound_ms"] / row["ms"])
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["ms"])
    assert told["kernels"][0]["most"][0]["us_a_step"] > 0


def test_matrices_in_int8_in_small() -> None:
    told = quantized(BENCH)
    assert told["int8"]["matrices"] == "int8 matrices by torch._int_mm"
    whole = {row["batch"]: row["bound_ms"] for row in decode(BENCH)["rows"]}
    assert {row["batch"] for row in told["int8"]["rows"]} == set(whole)
    assert all(row["same_tokens"] for row in told["int8"]["rows"])
    assert told["fp8"] == {"absent": "--quantize fp8 needs --dtype bfloat16; add it, or choose --quantize int8"}


def test_the_default_model_in_small(tiny_checkpoint: Path) -> None:
    threads = torch.get_num_threads()
    told = engine(BENCH, tiny_checkpoint)
    torch.set_num_threads(threads)
    assert [row["streams"] for row in told["rows"]] == [1, 3]
    assert all(len(row["values"]) == 3 for row in told["rows"])
