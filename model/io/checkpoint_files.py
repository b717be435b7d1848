"""Readers and checks of a checkpoint's files: JSON, file names, hashes; and CheckpointError. Torch-free."""

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from model.io.json_file import FileError, read_object
from model.io.one_line_error import OneLineError
from model.io.permissions import read_problem


class CheckpointError(OneLineError):
    """Error of an unusable checkpoint. One line: the file, the fault, the remedy."""


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that contains one JSON object.

    Raises:
        CheckpointError: the file cannot be read, or contains something else.
    """
    check_is_file(path)
    try:
        return read_object(path)
    except FileError as error:
        raise CheckpointError(f"{path}: {error}") from error


def check_is_file(path: Path) -> None:
    """Check that the path is a regular file: reading a pipe or a device may never end.

    Raises:
        CheckpointError: it is not a regular file, or cannot be looked up.
    """
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return
    except OSError as error:
        link = "a broken link: " if path.is_symlink() and not isinstance(error, PermissionError) else ""
        raise CheckpointError(f"{path}: {link}{read_problem(path, error)}") from error
    raise CheckpointError(f"{path}: not a regular file; put the file itself there")


def check_is_searchable(directory: Path) -> None:
    """Check that this process may look up files in the directory.

    Raises:
        CheckpointError: permission is denied for the directory or for a directory above it.
    """
    try:
        os.stat(os.path.join(directory, "."))  # needs search permission, as every file in the directory does
    except PermissionError as error:
        raise CheckpointError(f"{directory}: {read_problem(directory, error)}") from error
    except OSError:
        return  # looking up a file reports every other error


def check_plain_name(path: Path, name: str) -> None:
    """Check that `name` is a plain file name, so that it cannot lead out of the directory.

    Raises:
        CheckpointError: it is not; the message names `path`, the file that lists the name.
    """
    if Path(name).name != name or name in (".", "..") or "\\" in name or "\0" in name or len(name) > 255:
        raise CheckpointError(f"{path}: {name!r} is not a plain file name; list files of this directory only")
