"""Logging setup: one line per record on stderr, with the process name."""

import logging
import sys

import litserve


def configure(level: str) -> None:
    """Set up logging in this process. LitServe's log lines are limited to warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(processName)s: %(message)s"))
    for name in ("service", "model"):
        ours = logging.getLogger(name)
        ours.handlers[:] = [handler]
        ours.setLevel(level.upper())
        ours.propagate = False
    litserve.configure_logging("warning", stream=sys.stderr)
