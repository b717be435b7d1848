"""Log lines as JSON: one valid object per line, for any text."""

import json
import logging
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from service.config.log_setup import FIELDS, JsonFormatter

PROGRAM = """
import logging, warnings
from service.config import log_setup
log_setup.configure("info", {log_format!r})
logging.getLogger("service.x").info("one\\ntwo")
logging.getLogger("service.x").debug("below the level")
logging.getLogger("asyncio").warning("of a library")
warnings.warn("a warning")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("kvasir.request").exception("failed", extra={{log_setup.FIELDS: {{"status": 500}}}})
"""


def run(log_format: str) -> list[str]:
    """Return the lines on stderr of a process that logs in this format."""
    program = [sys.executable, "-c", PROGRAM.format(log_format=log_format)]
    return subprocess.run(program, capture_output=True, text=True, check=True).stderr.splitlines()


@given(st.text(), st.dictionaries(st.text(), st.none() | st.booleans() | st.floats(allow_nan=False) | st.text()))
def test_any_text_is_one_line_of_json(text: str, fields: dict[str, object]) -> None:
    record = logging.LogRecord("kvasir.request", logging.INFO, "", 0, "%s", (text,), None)
    setattr(record, FIELDS, {"more": fields})
    line = JsonFormatter().format(record)
    assert line.splitlines() == [line]
    assert line.isascii()
    entry = json.loads(line)
    assert (entry["message"], entry["more"], entry["level"]) == (text, fields, "INFO")


def test_in_json_each_line_is_an_object_with_the_same_keys() -> None:
    first, library, warning, failure = (json.loads(line) for line in run("json"))
    assert first["message"] == "one\ntwo"
    assert first.keys() == {"time", "level", "process", "logger", "message"}
    assert (library["logger"], library["message"]) == ("asyncio", "of a library")
    assert "a warning" in warning["message"]
    assert (failure["logger"], failure["status"]) == ("kvasir.request", 500)
    assert "ZeroDivisionError" in failure["exception"]


def test_text_lines_have_time_level_process_and_message() -> None:
    first, second = run("text")[:2]
    assert first.endswith(" INFO MainProcess: one")
    assert second == "two"
