"""Unreadable checkpoints: the message names the path that denies access, its mode, and the remedy.

A child process without privileges reads the files, because root may read a file whatever its mode.
"""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.io.files import CheckpointError, reading

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "checkpoints" / "kvasir-20m"
NOBODY = 65534
IS_ROOT = os.geteuid() == 0
UID, GID = (NOBODY, NOBODY) if IS_ROOT else (os.geteuid(), os.getegid())
# A child of another user cannot use the owner's permissions.
DENIED_DIRECTORY, DENIED_FILE = (0o700, 0o600) if IS_ROOT else (0, 0)
SHARD = "model-00001-of-00003.safetensors"
READ = f"""
import os, sys
from pathlib import Path
from model.checkpoint.manifest import read_manifest
from model.io.files import CheckpointError
import numpy  # safetensors imports numpy later, when this user cannot read the packages

if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
try:
    read_manifest(Path(sys.argv[1])).verify()
except CheckpointError as error:
    print(error)
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """Return a checkpoint below two directories that are searchable by every user; pytest's directories are not."""
    top = Path(tempfile.mkdtemp()).resolve()
    model = top / "models" / "tiny"
    try:
        shutil.copytree(SHIPPED, model)
        for path in (top, *top.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield model
    finally:
        for path in (top, top / "models", model):
            path.chmod(0o755)
        shutil.rmtree(top)


def read(directory: Path) -> str:
    """Return the error of a process without privileges that reads the checkpoint, or "" without an error."""
    done = subprocess.run(
        [sys.executable, "-c", READ, str(directory)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


def test_a_readable_checkpoint_has_no_permission_problem(directory: Path) -> None:
    assert read(directory) == ""


@pytest.mark.parametrize(
    ("closed", "unreadable", "mode", "right"),
    [
        (".", ".", DENIED_DIRECTORY, "a+rX"),
        ("..", ".", DENIED_DIRECTORY, "a+rX"),
        ("config.json", "config.json", DENIED_FILE, "a+r"),
        ("manifest.json", "manifest.json", DENIED_FILE, "a+r"),
        (SHARD, SHARD, DENIED_FILE, "a+r"),
        ("tokenizer.tiktoken", "tokenizer.tiktoken", DENIED_FILE, "a+r"),
    ],
)
def test_the_path_that_denies_access_is_named(
    directory: Path, closed: str, unreadable: str, mode: int, right: str
) -> None:
    denying = Path(os.path.normpath(directory / closed))
    denying.chmod(mode)
    assert read(directory) == (
        f"{directory / unreadable}: permission denied by {denying}, which belongs to uid {os.geteuid()}, "
        f"gid {denying.stat().st_gid} with mode {mode:04o}, and this process has uid {UID}, gid {GID}; "
        f"run `chmod {right} {denying}` or `chown` (for a container: the mounted path on the host)"
    )


def test_an_error_names_an_unreadable_directory_behind_a_link(directory: Path) -> None:
    """In a cache of the Hugging Face hub, files are links to blobs."""
    blobs = directory.parent / "blobs"
    blobs.mkdir()
    (directory / SHARD).rename(blobs / "weights")
    (directory / SHARD).symlink_to("../blobs/weights")
    blobs.chmod(DENIED_DIRECTORY)
    try:
        message = read(directory)
    finally:
        blobs.chmod(0o755)
    assert message.startswith(f"{directory / SHARD}: permission denied by {blobs}, which belongs to ")


def test_a_hugging_face_directory_gives_the_same_error(directory: Path) -> None:
    (directory / "manifest.json").unlink()
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    directory.chmod(DENIED_DIRECTORY)
    assert f"{directory}: permission denied by {directory}, " in read(directory)


def error_of(path: Path, error: OSError) -> str:
    with pytest.raises(CheckpointError) as caught, reading(path):
        raise error
    return str(caught.value).removeprefix(f"{path}: ")


def test_modes_that_allow_reading_point_to_other_causes(directory: Path) -> None:
    """An ACL or SELinux may deny what the modes allow; a test can set up neither."""
    problem = error_of(directory / "config.json", PermissionError(13, "Permission denied"))
    assert problem.startswith("permission denied although the file modes allow it (this process has uid ")
    assert problem.endswith("an ACL or SELinux, or in a container for the mount option :z")


def test_other_read_errors_quote_the_operating_system(tmp_path: Path) -> None:
    memory = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert error_of(tmp_path, memory) == "Cannot allocate memory; free memory, or raise the limit of this process"
    assert error_of(tmp_path, OSError(5, "Input/output error")) == "Input/output error; copy the whole checkpoint again"
