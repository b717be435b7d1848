"""Where log lines go and what they look like: stderr, one line each, the process named."""

import logging
import sys

import litserve


def configure(level: str) -> None:
    """Set up logging in this process. LitServe's own remarks are heard from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(processName)s: %(message)s"))
    for name in ("service", "model"):
        ours = logging.getLogger(name)
        ours.handlers[:] = [handler]
        ours.setLevel(level.upper())
        ours.propagate = False
    litserve.configure_logging("warning", stream=sys.stderr)
