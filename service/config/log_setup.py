"""Logging setup: one line per record on stderr, with the process name, as text or as a JSON object."""

import json
import logging
import sys
from datetime import UTC, datetime

# Attribute of a log record: further keys of its JSON object.
FIELDS = "fields"


class JsonFormatter(logging.Formatter):
    """Formatter that writes a log record as one line of JSON, which contains no line break and only ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a log record as a JSON object. A traceback becomes the string `exception`."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": record.processName,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure(level: str, log_format: str = "text") -> None:
    """Log to stderr from `level` up in this process. Of libraries, only warnings and errors are written.

    In text format, libraries other than LitServe keep their own handlers.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_json = log_format == "json"
    text = logging.Formatter("%(asctime)s %(levelname)s %(processName)s: %(message)s")
    handler.setFormatter(JsonFormatter() if is_json else text)
    lowest = level.upper()
    for name, threshold in (("service", lowest), ("model", lowest), ("kvasir", lowest), ("litserve", "WARNING")):
        ours = logging.getLogger(name)
        ours.handlers[:] = [handler]
        ours.setLevel(threshold)
        ours.propagate = False
    if is_json:
        logging.getLogger().handlers[:] = [handler]
        logging.captureWarnings(True)
