"""Summary of a run of loadtest/gpu/suite.sh: suite.json with all results, and page.md, a page written from it.

python -m loadtest.gpu.report FOLDER
"""

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from loadtest.inprocess.bench_engine import DECODE_COLUMNS, PROMPT_COLUMNS
from loadtest.measurement.figures import Column, table

_PART = re.compile(r"(?P<name>\w+): (?P<state>[\w ]+?), (?:exit code (?P<code>\d+), (?P<seconds>\d+) s|.*)")
_COMPARED_COLUMNS = (
    Column("sequences", "batch_size"),
    Column("context", "context_length"),
    Column("ms per step", "step_ms", ".2f"),
    Column("ms per step of transformers", "their_ms", ".2f"),
    Column("times as fast, at least", "ratio", ".2f"),
)
_MAX_LOG = 20_000  # characters of the log of a part that did not pass


def read_results(folder: Path) -> dict[str, Any]:
    """Return the results of the suite's parts by name. Incomplete JSON or XML of a part is left out."""
    parts = {}
    for line in (folder / "summary.txt").read_text().splitlines():
        if (found := _PART.fullmatch(line)) is None:
            raise ValueError(f"{folder}/summary.txt: unknown line: {line}")
        name, state = found["name"], found["state"]
        part: dict[str, Any] = {"state": state}
        if found["code"] is not None:
            part |= {"exit_code": int(found["code"]), "seconds": int(found["seconds"])}
        log = folder / f"{name}.log"
        if state not in ("passed", "absent") and log.is_file():
            part["log"] = log.read_text(errors="replace")[-_MAX_LOG:]
        parts[name] = part | _tests(folder / f"{name}.xml") | _figures(folder / f"{name}.json")
    return {"parts": parts}


def _figures(path: Path) -> dict[str, Any]:
    try:
        return {"figures": json.loads(path.read_text())}
    except (OSError, ValueError):
        return {}


def _tests(path: Path) -> dict[str, Any]:
    """Return the number of tests, and the names of those that failed, of a JUnit file."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {}
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {"num_tests": len(cases), "failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed]}


def write_page(results: dict[str, Any]) -> str:
    """Return page.md: the state of the suite's parts, and the benchmarks' tables with their share of the roofline."""
    lines = ["# GPU suite", "", "| part | state | seconds | tests | failed tests |", "|---|---|---:|---:|---|"]
    for name, part in results["parts"].items():
        failed = ", ".join(f"`{each}`" for each in part.get("failed", []))
        lines.append(
            f"| {name} | {part['state']} | {part.get('seconds', '')} | {part.get('num_tests', '')} | {failed} |"
        )
    for name, part in results["parts"].items():
        if (figures := part.get("figures")) is None or "roofline" not in figures:
            continue
        model, limits = figures["model"], figures["roofline"]
        lines += ["", f"## {name}: {model['name']}, {model['weights']} on {model['device']}", ""]
        lines += [f"Limits measured in the same run: {_middle(limits['gb_per_second']):.0f} GB/s of memory reads, "
                  f"{_middle(limits['gflops']):.0f} GFLOP/s.", ""]  # fmt: skip
        for columns, rows in ((DECODE_COLUMNS, figures["decode"]), (PROMPT_COLUMNS, figures["prompts"])):
            lines += [table(columns, rows), ""]
    if compared := _beside_transformers(results["parts"]):
        lines += ["", "## Beside transformers' continuous batching", ""]
        lines += ["Median and range of the repeats. The ratio is of their fastest repeat and our slowest one.", ""]
        lines += [table(_COMPARED_COLUMNS, compared)]
    return "\n".join(lines).rstrip() + "\n"


def _beside_transformers(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the decode steps of both engines, of the batch sizes that both have measured."""
    ours, theirs = (parts.get(name, {}).get("figures", {}).get("decode", []) for name in ("decode", "transformers"))
    times = {row["batch_size"]: row["step_ms"] for row in theirs}
    return [
        {**row, "their_ms": times[row["batch_size"]], "ratio": times[row["batch_size"]]["min"] / row["step_ms"]["max"]}
        for row in ours
        if row["batch_size"] in times
    ]


def _middle(figure: dict[str, float]) -> float:
    return figure["median"]


def main() -> int:
    """Write suite.json and page.md of a folder, and return the exit code."""
    (folder,) = map(Path, sys.argv[1:])
    results = read_results(folder)
    (folder / "suite.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "page.md").write_text(write_page(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
