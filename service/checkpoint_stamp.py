"""Whether a checkpoint's weights are still the ones that were checked when the service started."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

# Of each file: size in bytes, and when it was last written, in nanoseconds.
Stamps: TypeAlias = Mapping[Path, tuple[int, int]]


class CheckpointChanged(ValueError):
    """A worker that took the place of another would go on with streams by other weights."""


def stamps_of(paths: Iterable[Path]) -> Stamps:
    """What can be told of files without reading them.

    Raises:
        OSError: one is missing.
    """
    stats = {path: path.stat() for path in paths}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def check_unchanged(stamps: Stamps) -> None:
    """Compare with what is there now.

    Raises:
        CheckpointChanged: a file is another one, or gone.
    """
    for path, stamp in stamps.items():
        try:
            is_same = stamps_of([path]) == {path: stamp}
        except OSError as error:
            raise CheckpointChanged(f"{path}: {error.strerror}; put it back, and start the service again") from None
        if not is_same:
            raise CheckpointChanged(f"{path} has changed since the service started; start it again")
