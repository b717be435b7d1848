"""Error texts for unreadable files: the path that denies access, the user, and the remedy. Torch-free."""

import os
import stat
from pathlib import Path


def read_problem(path: Path, error: OSError) -> str:
    """Describe why `path` cannot be read, and the remedy; without the path itself, in one line."""
    if not isinstance(error, PermissionError):
        return f"{error.strerror}; is the checkpoint complete?"
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
    """Return the first path, from the root on, that denies this process what it needs to read `path`, after its links.

    None if the modes allow everything.
    """
    target = path.resolve()
    for directory in reversed(target.parents):
        if not os.access(directory, os.X_OK):
            return directory
    needed = os.R_OK | os.X_OK if target.is_dir() else os.R_OK
    return None if os.access(target, needed) else target
