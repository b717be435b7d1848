"""Atomic writing of a directory: files are written to a temporary directory, which is renamed at the end."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from model.io.checkpoint_files import CheckpointError
from model.tokenizer.interface import TokenizerError


@contextlib.contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """Yield a temporary directory to write to. It becomes `out` when the block ends, and is removed if the block fails.

    The temporary directory is next to `out` and is renamed to `out`. If `out` exists, it is not replaced, because it
    may be a mount point or the working directory of a process. Then the temporary directory is inside `out`, and its
    files are moved to `out`.

    Raises:
        CheckpointError: `out` is a file, is not empty (its files are left unchanged), or cannot be written.
    """
    _check_free(out)
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
    except (CheckpointError, TokenizerError) as error:
        raise type(error)(_named(error, partial, out)) from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out}: {_named(error, partial, out)}; nothing was written") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_free(out: Path) -> None:
    try:
        taken = out.is_dir() and any(out.iterdir())
    except OSError as error:
        raise CheckpointError(f"{out}: {error.strerror}; choose another directory") from error
    if taken:
        raise CheckpointError(f"{out}: holds files; choose an empty or a new directory")
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out}: is a file; choose an empty or a new directory")


def _named(error: Exception, partial: Path, out: Path) -> str:
    """Return an error's message, with the temporary directory's name replaced by that of `out`."""
    return str(error).replace(str(partial), str(out))
