"""Strict readers of the JSON and text files beside a checkpoint's weights. Torch-free.

The files come from elsewhere. An interrupted download leaves broken links, and reading a pipe or device may never end.
Callers convert `FileError` to their own error type and prepend the file's name.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from model.io.permissions import read_problem


class FileError(ValueError):
    """Error of an unusable file. One line without the file's name: the fact, then the remedy."""


def is_named(path: Path) -> bool:
    """Return whether the directory has such an entry; a broken link counts."""
    return os.path.lexists(path)


def read_bytes(path: Path) -> bytes:
    """Read all of a regular file.

    Raises:
        FileError: the file is missing, a broken link, not a regular file, or cannot be read.
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
    """Read a regular file in UTF-8 and convert its line ends to \\n.

    Raises:
        FileError: as `read_bytes`, or the file is not UTF-8.
    """
    try:
        return read_bytes(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise FileError("not UTF-8; save it as UTF-8") from error


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read the JSON object in a regular file; an empty object if `optional` and the file is missing.

    Raises:
        FileError: as `read_bytes`, or the file contains something else.
    """
    if optional and not is_named(path):
        return {}
    try:
        values = json.loads(read_bytes(path))
    except FileError:
        raise
    except RecursionError as error:
        raise FileError("not JSON: nested too deeply; correct or remove the file") from error
    except ValueError as error:
        raise FileError(f"not JSON: {error}; correct or remove the file") from error
    if not isinstance(values, dict):
        raise FileError("a JSON object expected; correct or remove the file")
    return values
