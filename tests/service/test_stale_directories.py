"""What killed services leave behind, and what is in use."""

import subprocess
import sys
from pathlib import Path

from service.stale_directories import claim, remove_stale_directories

_CLAIM = """
import sys
from pathlib import Path
from service.stale_directories import claim
claim(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


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
