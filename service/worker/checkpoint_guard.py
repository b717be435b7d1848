"""Detection of checkpoint files that have changed since the service started, by size and modification time."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

# Size in bytes and modification time in nanoseconds of each file.
Stamps: TypeAlias = Mapping[Path, tuple[int, int]]


class CheckpointChanged(ValueError):
    """A checkpoint file has changed, so a new worker would continue streams with different weights."""


def stamps_of(paths: Iterable[Path]) -> Stamps:
    """Return the size and modification time of each file.

    Raises:
        OSError: a file is missing.
    """
    stats = {path: path.stat() for path in paths}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def check_unchanged(stamps: Stamps) -> None:
    """Compare earlier stamps with the files as they are now.

    Raises:
        CheckpointChanged: a file has changed or is missing.
    """
    for path, stamp in stamps.items():
        try:
            is_same = stamps_of([path]) == {path: stamp}
        except OSError as error:
            raise CheckpointChanged(f"{path}: {error.strerror}; restore the file and restart the service") from None
        if not is_same:
            raise CheckpointChanged(f"{path} has changed since the service started; restart the service")
