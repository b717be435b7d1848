"""A directory that is written in whole or not at all: conversions work beside it and rename at the end."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from model.checkpoint_files import CheckpointError
from model.tokenizer.interface import TokenizerError


@contextlib.contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """A new directory to write into, which becomes `out` when the block ends and vanishes when it fails.

    It stands beside `out` and is renamed. An `out` that exists, and is empty, may be a mount or somebody's working
    directory, which cannot be replaced: then it stands inside, and its files are moved up.

    Raises:
        CheckpointError: `out` is a file or holds something (nothing in it is touched), or cannot be written.
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
    """The message, naming the directory that was asked for."""
    return str(error).replace(str(partial), str(out))
