"""loadtest/gpu/suite.sh, run without a GPU and with stubs in place of the tests and benchmarks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.gpu.report import read_results, write_page

SCRIPT = Path(__file__).parents[2] / "loadtest" / "gpu" / "suite.sh"
PARTS = [
    "paged",
    "decode",
    "transformers",
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
    *bench_command*int8*) echo '{{"decode": []}}' >"$(out "$@")" ;;
    *bench_command*qwen2-1.5b*"--batch 1 2 "*"-- --dtype bfloat16") echo "out of memory"; exit 3 ;;
    *bench_command*--checkpoint*) exit 124 ;;
    *bench_command*"--attention sdpa"*) echo '{{"rows": [' >"$(out "$@")"; exit 137 ;;
    *pip*) exit 0 ;;
    *"import sys, torch"*) exit {no_gpu} ;;
esac
"""


def run(tmp_path: Path, *, no_gpu: int = 0, budget: int = 500, wheels: bool = False) -> dict[str, str]:
    """Run the suite and return the state of each part."""
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(no_gpu=no_gpu))
    python.chmod(0o755)
    arguments = [str(SCRIPT), str(tmp_path / "results"), *([str(tmp_path)] if wheels else [])]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "BUDGET": str(budget)}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = (tmp_path / "results" / "summary.txt").read_text().splitlines()
    return {line.partition(":")[0]: line.partition(": ")[2].partition(",")[0] for line in lines}


def test_every_part_runs_even_if_others_fail(tmp_path: Path) -> None:
    parts = run(tmp_path)
    assert list(parts) == PARTS
    failed = {"decode": "failed", "engine": "cut short", "attention": "cut short"}
    assert parts == {name: failed.get(name, "passed") for name in PARTS}
    assert (tmp_path / "results" / "int8.json").read_text() == '{"decode": []}\n'
    assert (tmp_path / "results" / "decode.log").read_text() == "out of memory\n"
    assert "decode: failed, exit code 3, " in (tmp_path / "results" / "summary.txt").read_text()


def test_without_a_gpu_every_part_is_absent(tmp_path: Path) -> None:
    assert run(tmp_path, no_gpu=1) == dict.fromkeys(PARTS, "absent")


def test_wheels_are_installed_first(tmp_path: Path) -> None:
    assert list(run(tmp_path, wheels=True)) == ["wheels", *PARTS]


def test_without_time_every_part_is_reported_as_cut_short(tmp_path: Path) -> None:
    assert run(tmp_path, budget=0) == dict.fromkeys(PARTS, "cut short")
    assert (tmp_path / "results" / "paged.log").read_text() == "no time left\n"


def test_the_limits_of_all_parts_add_up_to_the_budget() -> None:
    """No part is left out, and a start of the GPU machine fits into the rest of ten minutes."""
    text = SCRIPT.read_text()
    limits = re.findall(r"^ *(?:part|tests|bench) \w+ (\d+) ", text, re.MULTILINE)
    assert len(limits) == 1 + len(PARTS)
    assert sum(map(int, limits)) == 530
    assert "budget=${BUDGET:-530}" in text


@pytest.mark.slow
def test_a_dry_run_needs_no_gpu_and_ends_in_one_file_and_a_page(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "DRY_RUN": "1", "PARTS": "decode transformers"}
    done = subprocess.run([str(SCRIPT), "results"], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results" / "suite.json").read_text())
    states = {name: part["state"] for name, part in results["parts"].items()}
    assert states == {"decode": "passed", "transformers": "passed"}, results
    assert results["parts"]["decode"]["figures"]["decode"][0]["of_the_roofline"]["median"] > 0
    page = (tmp_path / "results" / "page.md").read_text()
    assert "## decode: kvasir-20m" in page
    assert "share of the roofline" in page
    assert "## Beside transformers' continuous batching" in page


def test_the_report_keeps_what_a_failed_part_has_left(tmp_path: Path) -> None:
    summary = "wheels: passed, exit code 0, 4 s\npaged: failed, exit code 1, 9 s\nint8: cut short, exit code 124, 2 s\n"
    (tmp_path / "summary.txt").write_text(summary + "fp8: absent, no CUDA device\n")
    (tmp_path / "paged.log").write_text("x" * 30_000 + "end")
    (tmp_path / "int8.json").write_text('{"decode": [')
    case = '<testcase classname="tests.gpu.test_paged" name="test_a"><failure/></testcase>'
    (tmp_path / "paged.xml").write_text(f'<testsuites><testsuite>{case}<testcase name="b"/></testsuite></testsuites>')
    parts = read_results(tmp_path)["parts"]
    assert list(parts) == ["wheels", "paged", "int8", "fp8"]
    assert (parts["paged"]["num_tests"], parts["paged"]["failed"]) == (2, ["tests.gpu.test_paged::test_a"])
    assert parts["paged"]["log"].endswith("end")
    assert "figures" not in parts["int8"]
    assert parts["fp8"] == {"state": "absent"}
    assert "| paged | failed | 9 | 2 | `tests.gpu.test_paged::test_a` |" in write_page({"parts": parts})


def test_the_ratio_is_of_their_fastest_repeat_and_our_slowest() -> None:
    def part(*rows: tuple[int, float, float]) -> dict[str, Any]:
        steps = ((batch, {"median": low, "min": low, "max": high}) for batch, low, high in rows)
        decode = [{"batch_size": batch, "context_length": 1024, "step_ms": step} for batch, step in steps]
        return {"state": "passed", "figures": {"decode": decode}}

    page = write_page({"parts": {"decode": part((1, 1.0, 2.0), (4, 3.0, 3.0)), "transformers": part((1, 5.0, 9.0))}})
    assert "| 1 | 1024 | 1.00 (1.00–2.00) | 5.00 (5.00–9.00) | 2.50 |" in page
    assert "| 4 |" not in page


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"]])
def test_wrong_arguments_print_the_usage(arguments: list[str]) -> None:
    done = subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "loadtest/gpu/suite.sh OUT [WHEELS]" in done.stderr


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    done = subprocess.run([str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "exists; choose a new folder" in done.stderr
