"""Reading and writing of checkpoint files, with one-line errors that name the file and the remedy. Torch-free."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

HEAD_CHARACTERS, TAIL_CHARACTERS = 300, 180
_HASHED_BYTES = 2**24
# The largest tokenizer.json in use has 33 MiB. Parsed, a file takes up to 30 times its size in memory.
_MAX_JSON_MIB = 64


class OneLineError(ValueError):
    """Error whose message is shown to users as one printable line: the file, the fact, the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(error_line(message))


class CheckpointError(OneLineError):
    """Error of an unusable file or directory of a checkpoint. The message names the file."""


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message. Without one: "out of memory" for MemoryError, else its repr."""
    return next(iter(str(error).splitlines()), "out of memory" if isinstance(error, MemoryError) else repr(error))


def error_line(text: str) -> str:
    """Return an error message in one line: unprintable characters replaced, the middle of a long message cut out.

    The beginning of a message has the fact and the end has the remedy, so both stay.
    """
    if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS:
        text = f"{text[:HEAD_CHARACTERS]} … {text[-TAIL_CHARACTERS:]}"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context manager: turn an OSError of reading a file into a CheckpointError that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {_read_problem(path, error)}") from error


@contextlib.contextmanager
def parsing(path: Path) -> Iterator[None]:
    """Context manager: turn an error of parsing a file's content into a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except OneLineError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: malformed: {error!r}; copy the file again") from error


def check_is_file(path: Path) -> None:
    """Raise CheckpointError unless the path is a regular file: reading a pipe or a device may never end."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return
        problem = "not a regular file; put the file itself there"
    except FileNotFoundError:
        is_link = os.path.lexists(path)
        problem = (
            "a link to a file that is not there; download the file again" if is_link else "missing; copy the file there"
        )
    except OSError as error:
        problem = _read_problem(path, error)
    raise CheckpointError(f"{path}: {problem}")


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises CheckpointError."""
    check_is_file(path)
    with reading(path):
        return path.read_bytes()


def read_text(path: Path) -> str:
    """Return the text of a regular UTF-8 file, with line ends converted to \\n. Raises CheckpointError."""
    try:
        return read_bytes(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8; save it as UTF-8") from error


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read a JSON object from a file; an empty object if `optional` and the file is missing. Raises CheckpointError."""
    if optional and not os.path.lexists(path):
        return {}
    check_is_file(path)
    with reading(path):
        mib = path.stat().st_size >> 20
    if mib >= _MAX_JSON_MIB:
        raise CheckpointError(
            f"{path}: is {mib} MiB long, but a JSON file must be under {_MAX_JSON_MIB} MiB; it is probably "
            "damaged: copy it again"
        )
    data = read_bytes(path)
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{path}: not JSON: {reason}; correct or remove the file") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: a JSON object expected; correct or remove the file")
    return values


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raises CheckpointError.

    Large parts are read and hashed without the GIL, so that a thread does not delay the other threads.
    """
    with reading(path), path.open("rb", buffering=0) as file:
        digest, part = hashlib.sha256(), memoryview(bytearray(min(path.stat().st_size + 1, _HASHED_BYTES)))
        while size := file.readinto(part):
            digest.update(part[:size])
        return digest.hexdigest()


def check_is_searchable(directory: Path) -> None:
    """Raise CheckpointError if permission to look up files in the directory is denied. A missing path is accepted."""
    with reading(directory), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.stat(os.path.join(directory, "."))  # needs search permission, as every file in the directory does


def check_plain_name(path: Path, name: str) -> None:
    """Raise CheckpointError if `name`, which the file `path` lists, could lead to a file outside the directory."""
    if Path(name).name != name or name in (".", "..") or "\\" in name or "\0" in name or len(name) > 255:
        raise CheckpointError(f"{path}: {name!r} is not a plain file name; list files of this directory only")


def _read_problem(path: Path, error: OSError) -> str:
    """Return why a file cannot be read, and the remedy. For a denied permission, name the denying path and the user."""
    if isinstance(error, FileNotFoundError):
        return "no such file; correct the path"
    if error.errno in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return f"{error.strerror}; free memory, or raise the limit of this process"
    if not isinstance(error, PermissionError):
        return f"{error.strerror}; copy the whole checkpoint again"
    blocker = _blocker(path)
    user = f"this process has uid {os.geteuid()}, gid {os.getegid()}"
    if blocker is None:
        return (
            f"permission denied although the file modes allow it ({user}); look for an ACL or SELinux, "
            "or in a container for the mount option :z"
        )
    status = blocker.stat()
    right = "a+rX" if blocker.is_dir() else "a+r"
    return (
        f"permission denied by {blocker}, which belongs to uid {status.st_uid}, gid {status.st_gid} with mode "
        f"{stat.S_IMODE(status.st_mode):04o}, and {user}; run `chmod {right} {blocker}` or `chown` "
        "(for a container: the mounted path on the host)"
    )


def _blocker(path: Path) -> Path | None:
    """Return the first directory or file on the path, from the root, whose mode denies reading; None: all allow it."""
    target = path.resolve()
    for directory in reversed(target.parents):
        if not os.access(directory, os.X_OK):
            return directory
    needed = os.R_OK | os.X_OK if target.is_dir() else os.R_OK
    return None if os.access(target, needed) else target


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Context manager: turn an OSError of writing to a directory into a CheckpointError that names the directory."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{out}: {error.strerror}; choose another directory") from error


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object to a file, indented."""
    path.write_text(json.dumps(values, indent=2) + "\n")


def check_is_empty(out: Path) -> None:
    """Raise CheckpointError unless the path is an empty directory or does not exist."""
    with writing(out):
        if out.is_dir() and any(out.iterdir()):
            raise CheckpointError(f"{out}: holds files; choose an empty or a new directory")
        if out.exists() and not out.is_dir():
            raise CheckpointError(f"{out}: is a file; choose an empty or a new directory")


@contextlib.contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """Context manager: yield a temporary directory, which becomes `out` after the block, or is removed if it fails.

    An existing `out` may be a mount point, so it is not replaced: the temporary directory's files are moved there.

    Raises:
        CheckpointError: `out` is a file, is not empty (its files are left unchanged), or cannot be written. A
            OneLineError, OSError or SafetensorError of the block is raised as a CheckpointError too.
    """
    check_is_empty(out)
    final = out.resolve()
    partial = (final if final.is_dir() else final.parent) / f".{final.name}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        yield partial
        if final.is_dir():
            for path in sorted(partial.iterdir()):
                path.rename(final / path.name)
        else:
            partial.rename(final)
    except (OneLineError, OSError, SafetensorError) as error:
        message = str(error).replace(str(partial), str(out))
        if not isinstance(error, OneLineError):
            message = f"{out}: {message}; nothing was written"
        raise CheckpointError(message) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
