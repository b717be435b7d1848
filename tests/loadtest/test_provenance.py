"""Provenance of a figure: command, commit, machine, and CPU use of other processes before the measurement."""

import os
import subprocess
from pathlib import Path

import pytest

from loadtest.measurement import provenance
from loadtest.measurement.provenance import machine, other_work, quiet_or_warned


def test_the_command_is_quoted_for_a_shell() -> None:
    facts = provenance.provenance("python -m loadtest.client.report", ["--out", "a dir", "x.json"])
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
        return str(provenance.provenance("x", [])["commit"])

    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
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
    facts = machine()
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["memory_gib"] > 0.1


def test_busy_cores_are_measured_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0.0 <= other_work(0.05) <= 2.0 * (os.cpu_count() or 1)
    monkeypatch.setattr(provenance, "other_work", lambda: 0.1234)
    assert quiet_or_warned("bench") == 0.12
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(provenance, "other_work", lambda: 1.5)
    assert quiet_or_warned("bench") == 1.5
    assert "other processes keep 1.5 cores busy" in capsys.readouterr().err
