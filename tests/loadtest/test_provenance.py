"""Provenance of a figure: command, commit, machine, and CPU use of other processes before the measurement."""

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from loadtest.measurement import benchmark_program
from loadtest.measurement.benchmark_program import ForeignWork, measure_other_work


def test_the_command_is_quoted_for_a_shell() -> None:
    facts = benchmark_program.provenance("python -m loadtest.client.report", ["--out", "a dir", "x.json"])
    assert facts["command"] == "python -m loadtest.client.report --out 'a dir' x.json"
    assert facts["versions"]["torch"]


def test_the_commit_of_the_working_tree_with_local_changes_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit() -> str:
        return str(benchmark_program.provenance("x", [])["commit"])

    monkeypatch.setattr(benchmark_program, "_ROOT", tmp_path)
    assert commit() == "unknown"
    git("init")
    (tmp_path / "docs").mkdir()
    for name in ("code.py", "docs/result.json"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    head = git("rev-parse", "--short=12", "HEAD")
    assert commit() == head
    (tmp_path / "docs/result.json").write_text("2")  # results of a run in docs/ do not count as changes
    assert commit() == head
    (tmp_path / "code.py").write_text("2")
    assert commit() == f"{head} with local changes"


def test_the_machine_has_cores_and_memory() -> None:
    facts = benchmark_program.provenance("x", [])["machine"]
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["memory_gib"] > 0.1


@pytest.mark.parametrize(("cores", "warning"), [(0.1234, ""), (1.5, "other processes keep 1.5 cores busy")])
def test_busy_cores_are_measured_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cores: float, warning: str
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(ForeignWork, "cores", lambda self: cores)
    assert measure_other_work("bench") == round(cores, 2)
    shown = capsys.readouterr().err
    assert warning in shown if warning else shown == ""


class Machine:
    """CPU seconds of a simulated machine, set by a test."""

    def __init__(self) -> None:
        self.busy = self.now = self.own = 0.0
        self.children: list[float | None] = []

    def process(self) -> Any:
        """Return a process as psutil does. A child of None has just ended."""

        def times(seconds: float | None) -> tuple[float, ...]:
            if seconds is None:
                raise psutil.NoSuchProcess(1)
            return (seconds, 0.0, 0.0, 0.0, 99.0)  # the fifth value is I/O wait

        children = [SimpleNamespace(cpu_times=lambda seconds=seconds: times(seconds)) for seconds in self.children]
        return SimpleNamespace(children=lambda recursive: children if recursive else [])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return the simulated machine that `ForeignWork` measures."""
    made = Machine()
    monkeypatch.setattr(benchmark_program, "_busy_seconds", lambda: made.busy)
    monkeypatch.setattr(psutil, "Process", made.process)
    # Replaced in one module only, because other threads also use the clock.
    monkeypatch.setattr(benchmark_program, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(benchmark_program, "os", SimpleNamespace(times=lambda: (made.own, 0.0, 0.0, 0.0, made.now)))
    return made


def test_cores_kept_busy_by_other_processes(machine: Machine) -> None:
    machine.children = [10.0]
    foreign = ForeignWork()
    machine.now, machine.busy, machine.own, machine.children = 4.0, 8.0, 1.0, [13.0, 2.0, None]
    assert foreign.cores() == pytest.approx((8.0 - 1.0 - 3.0 - 2.0) / 4.0)


def test_busy_cores_are_never_negative(machine: Machine) -> None:
    foreign = ForeignWork()
    machine.now, machine.busy, machine.own = 1.0, 0.5, 0.6  # the two counts have different resolutions
    assert foreign.cores() == 0.0
