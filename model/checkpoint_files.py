"""The files of a checkpoint directory, read without torch: JSON, names, hashes; and their error."""

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from model.error_line import error_line
from model.json_file import FileError, read_object
from model.permissions import read_problem


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message is one line: the file, what is wrong, what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(error_line(message))


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        CheckpointError: it cannot be read, or holds something else.
    """
    check_is_file(path)
    try:
        return read_object(path)
    except FileError as error:
        raise CheckpointError(f"{path}: {error}") from error


def check_is_file(path: Path) -> None:
    """Raises CheckpointError unless the path is a regular file: reading a pipe or a device may never end."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return
    except OSError as error:
        link = "a link to nothing: " if path.is_symlink() and not isinstance(error, PermissionError) else ""
        raise CheckpointError(f"{path}: {link}{read_problem(path, error)}") from error
    raise CheckpointError(f"{path}: not a regular file; put the file itself there")


def check_is_searchable(directory: Path) -> None:
    """Raises CheckpointError if this process may not look up files in the directory, or may not reach it."""
    try:
        os.stat(os.path.join(directory, "."))  # needs the right to search, as every file in it does
    except PermissionError as error:
        raise CheckpointError(f"{directory}: {read_problem(directory, error)}") from error
    except OSError:
        return  # the look-up of a file reports everything else


def check_plain_name(path: Path, name: str) -> None:
    """Raises CheckpointError, naming the file that says so, unless `name` is a file beside it and nowhere else."""
    if Path(name).name != name or name in (".", "..") or "\\" in name or "\0" in name or len(name) > 255:
        raise CheckpointError(f"{path}: {name!r} is not a plain file name; list files of this directory only")
