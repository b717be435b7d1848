"""Metric directories: the lock, disk space, and removal of what killed services left."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from service.metrics.directory import claim, remove_stale_directories, reserve

_CLAIM = """
import sys
from pathlib import Path
from service.metrics.directory import claim
claim(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


def refuse(number: int) -> Any:
    def call(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return call


def test_what_a_killed_process_held_is_removed_and_nothing_else(tmp_path: Path) -> None:
    held, left, other, unclaimed = (tmp_path / name for name in ("x-held", "x-left", "other", "x-unclaimed"))
    for directory in (held, left, other, unclaimed):
        directory.mkdir()
        (directory / "values.db").write_bytes(b"1")
    claim(held)
    with subprocess.Popen(
        [sys.executable, "-c", _CLAIM, str(left)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"claimed\n"
        remove_stale_directories(tmp_path, "x-")
        assert left.exists()
        holder.kill()
    (other / "in-use").touch()
    remove_stale_directories(tmp_path, "x-")
    assert [directory.exists() for directory in (held, left, other, unclaimed)] == [True, False, True, True]


def test_room_is_taken_before_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = tmp_path / f"counter_{os.getpid()}.db", tmp_path / "counter_1.db"
    for path in (ours, other):
        with path.open("wb") as file:
            file.truncate(65536)
    assert (ours.stat().st_blocks, other.stat().st_blocks) == (0, 0)
    reserve(str(tmp_path), os.getpid())
    assert (ours.stat().st_blocks, other.stat().st_blocks) == (128, 0)
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.EOPNOTSUPP))
    reserve(str(tmp_path), os.getpid())
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        reserve(str(tmp_path), os.getpid())
