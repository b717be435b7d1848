"""The GPU suite without a GPU: the script with stub parts, the JSON report, and small measurements."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.gpu import report

SCRIPT = Path(__file__).parents[2] / "loadtest" / "gpu" / "suite.sh"
PARTS = [
    "paged",
    "decode",
    "engine",
    "int8",
    "fp8",
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
    *bench_command*int8*) echo '{{"decode": []}}' >"$(out "$@")" ;;
    *bench_command*qwen2-1.5b*"--batch 1 2 "*"-- --dtype bfloat16") echo "out of memory"; exit 3 ;;
    *bench_command*--checkpoint*) exit 124 ;;
    *bench_kernels*) echo '{{"rows": [' >"$(out "$@")"; exit 137 ;;
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
    parts = run(tmp_path, no_gpu=0)["parts"]
    assert list(parts) == PARTS
    assert (parts["int8"]["state"], parts["int8"]["result"]) == ("passed", {"decode": []})
    assert (parts["decode"]["state"], parts["decode"]["code"]) == ("failed", 3)
    assert parts["decode"]["end_of_log"] == "out of memory\n"
    assert parts["engine"]["state"] == parts["attention"]["state"] == "cut short"
    assert "result" not in parts["attention"]


def test_without_a_gpu_tests_and_benchmarks_are_absent(tmp_path: Path) -> None:
    parts = run(tmp_path)["parts"]
    assert list(parts) == PARTS
    assert {part["state"] for part in parts.values()} == {"absent"}


def test_with_a_gpu_tests_run_after_the_wheels(tmp_path: Path) -> None:
    parts = run(tmp_path, no_gpu=0, wheels=True)["parts"]
    assert list(parts) == ["wheels", *PARTS]
    assert {parts[name]["state"] for name in ("wheels", "paged", "engine_tests", "mechanisms", "training")} == {
        "passed"
    }


def test_without_time_every_part_is_reported_as_cut_short(tmp_path: Path) -> None:
    parts = run(tmp_path, budget=0)["parts"]
    assert [part["state"] for part in parts.values()] == ["cut short"] * len(PARTS)
    assert parts["paged"]["end_of_log"] == "no time left\n"


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
