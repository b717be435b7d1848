"""Report of `loadtest/gpu/suite.sh`: one JSON file, rewritten after every part to survive an interrupted run.

    python -m loadtest.gpu.report --out FILE --part NAME --code N --seconds N --log FILE --result FILE

Adds a part to FILE, which is created if missing: exit code, duration, end of its output, and its JSON if it wrote
any. An earlier report of the same part is replaced. Torch-free.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TAIL = 4000
# Exit codes of `timeout`, and of a shell for SIGKILL.
_CUT_SHORT = (124, 137)


def add_part(
    report: dict[str, Any], name: str, *, code: int, seconds: float, log: str, result: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the report with one more part. `state`: passed, failed, cut short, or absent without a device."""
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


def read(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None if the file is missing or incomplete."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Add a part to the report file."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.report", description="Add a part to a report.")
    for name, kind in {"out": Path, "part": str, "code": int, "seconds": float, "log": Path, "result": Path}.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    parsed = parser.parse_args(arguments)
    log, result = parsed.log.read_text(encoding="utf-8", errors="replace"), read(parsed.result)
    report = add_part(
        read(parsed.out) or {}, parsed.part, code=parsed.code, seconds=parsed.seconds, log=log, result=result
    )
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = parsed.out.with_suffix(".part")
    unfinished.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, parsed.out)
    print(f"{parsed.part}: {report['parts'][parsed.part]['state']} after {parsed.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
