"""Processes and threads of a running server are those of the table in docs/design.md, section 1."""

import re
from pathlib import Path

import psutil
import pytest

from tests.e2e.process import serving_anew, wait_until

pytestmark = pytest.mark.slow
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
ROW = re.compile(r"^\| `(?P<process>kvasir-\w+)` \|.*\|(?P<threads>[^|]+)\|$")
# Threads that a library starts while the standby imports keep the name which the standby has until then.
LIBRARY = "kvasir-importer"


def documented() -> dict[str, set[str]]:
    """Return the names of the threads of each process in the table."""
    section = DESIGN.read_text().partition("## 1. Processes")[2].partition("\n## ")[0]
    rows = [row for line in section.splitlines() if (row := ROW.match(line))]
    return {row["process"]: set(re.findall(r"`(kvasir-\w+)`", row["threads"])) for row in rows}


def threads_of(process: psutil.Process) -> set[str]:
    """Return the names of the threads of a process."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return {(task / "comm").read_text().strip() for task in tasks} - {LIBRARY}


def test_processes_and_threads_are_those_of_the_design_page(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with serving_anew(tiny_checkpoint, tmp_path, "--standby") as service:
        wait_until(lambda: any(child.name() == "kvasir-standby" for child in service.children), what="the standby")
        assert service.text("once", max_tokens=2) is not None
        processes = [psutil.Process(service.process.pid), *service.children]
        assert {process.name(): threads_of(process) for process in processes} == documented()
        assert len(processes) == len(documented())
        assert processes[0].num_threads() == 1
