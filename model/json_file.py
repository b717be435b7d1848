"""Files that stand beside weights, read with care: JSON objects and texts. Torch-free.

They come from elsewhere: a download that broke off leaves links to nothing, and what is no regular file may never end.
Every reader turns `FileError` into an error of its own type and puts the file's name before it.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from model.permissions import read_problem


class FileError(ValueError):
    """A file cannot be used. One line without the file's name: what is wrong, what to do."""


def is_named(path: Path) -> bool:
    """Whether the directory has such an entry, be it a link to nothing."""
    return os.path.lexists(path)


def read_bytes(path: Path) -> bytes:
    """All of a regular file.

    Raises:
        FileError: it is missing, a link to nothing, no regular file, or cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileError("not a regular file; put the file itself there")
        return path.read_bytes()
    except FileNotFoundError:
        if is_named(path):
            raise FileError("a link to a file that is not there; download it again") from None
        raise FileError("missing; copy the file there") from None
    except OSError as error:
        raise FileError(read_problem(path, error)) from error


def read_text(path: Path) -> str:
    """A regular file in UTF-8, its lines ended by \\n whoever wrote it.

    Raises:
        FileError: as `read_bytes`, or it is not UTF-8.
    """
    try:
        return read_bytes(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise FileError("not UTF-8; save it as UTF-8") from error


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object that a regular file holds; an empty one if the file may be missing and is.

    Raises:
        FileError: as `read_bytes`, or it holds something else.
    """
    if optional and not is_named(path):
        return {}
    try:
        values = json.loads(read_bytes(path))
    except FileError:
        raise
    except RecursionError as error:
        raise FileError("not JSON: nested too deeply; mend or remove the file") from error
    except ValueError as error:
        raise FileError(f"not JSON: {error}; mend or remove the file") from error
    if not isinstance(values, dict):
        raise FileError("a JSON object expected; mend or remove the file")
    return values
