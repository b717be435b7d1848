"""The one JSON of `loadtest/gpu_suite.sh`, written anew after every part, so that a run cut short leaves what it had.

    python -m loadtest.gpu_report --out FILE --part NAME --code N --seconds N --log FILE [--result FILE]

Adds a part to FILE (made if it is not there): its exit code, how long it took, the end of what it printed, and its own
JSON if it wrote one. A part that has been told before is replaced. Torch-free.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TAIL = 4000
# What `timeout` exits with, and what a shell makes of SIGKILL.
_CUT_SHORT = (124, 137)


def add_part(
    report: dict[str, Any], name: str, *, code: int, seconds: float, log: str, result: dict[str, Any] | None
) -> dict[str, Any]:
    """The report with one more part. `state`: passed, failed, cut short, or absent where there was no device."""
    if code in _CUT_SHORT:
        state = "cut short"
    elif code:
        state = "failed"
    else:
        state = "absent" if result is not None and "absent" in result else "passed"
    part: dict[str, Any] = {"state": state, "code": code, "seconds": seconds, "end_of_log": log[-_TAIL:]}
    if result is not None:
        part["result"] = result
    return {**report, "parts": {**report.get("parts", {}), name: part}}


def read(path: Path | None) -> dict[str, Any] | None:
    """A JSON object, or None where there is no file or half of one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu_report", description="Add a part to a report.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", required=True)
    parser.add_argument("--code", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--result", type=Path)
    parsed = parser.parse_args(arguments)
    known = read(parsed.out)
    report = add_part(
        {} if known is None else known,
        parsed.part,
        code=parsed.code,
        seconds=parsed.seconds,
        log=parsed.log.read_text(encoding="utf-8", errors="replace"),
        result=read(parsed.result),
    )
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = parsed.out.with_suffix(".part")
    unfinished.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, parsed.out)
    print(f"{parsed.part}: {report['parts'][parsed.part]['state']} after {parsed.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
