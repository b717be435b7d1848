"""Logging setup: one line per record on stderr, with the process name."""

import logging
import sys


def configure(level: str) -> None:
    """Log to stderr from `level` up in this process. Of LitServe's log, only warnings and errors are written."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(processName)s: %(message)s"))
    for name, lowest in (("service", level.upper()), ("model", level.upper()), ("litserve", "WARNING")):
        ours = logging.getLogger(name)
        ours.handlers[:] = [handler]
        ours.setLevel(lowest)
        ours.propagate = False
