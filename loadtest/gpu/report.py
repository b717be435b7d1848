"""Report of `loadtest/gpu/suite.sh`: one JSON file, rewritten after every part to survive an interrupted run.

    python -m loadtest.gpu.report OUT PART EXIT_CODE SECONDS LOG RESULT

Adds a part to the file OUT: exit code, duration, end of the file LOG, and the JSON of the file RESULT if the part wrote
any. An earlier report of the same part is replaced. Torch-free.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

_TAIL = 4000
_CUT_SHORT = (124, 137)  # exit codes of `timeout`, and of a shell for SIGKILL


def add_part(
    report: dict[str, Any], name: str, *, code: int, seconds: float, log: str, result: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the report with one more part. `state`: passed, failed, cut short, or absent without a device."""
    state = "absent" if result is not None and "absent" in result else "passed"
    if code:
        state = "cut short" if code in _CUT_SHORT else "failed"
    part: dict[str, Any] = {"state": state, "code": code, "seconds": seconds, "end_of_log": log[-_TAIL:]}
    if result is not None:
        part["result"] = result
    return {**report, "parts": {**report.get("parts", {}), name: part}}


def _read(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None if the file is missing or incomplete."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def main() -> None:
    """Add a part to the report file, as the command line says."""
    out, name, code, seconds, log, result = sys.argv[1:]
    path, text = Path(out), Path(log).read_text(encoding="utf-8", errors="replace")
    figures = _read(Path(result))
    report = add_part(_read(path) or {}, name, code=int(code), seconds=float(seconds), log=text, result=figures)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    print(f"{name}: {report['parts'][name]['state']} after {seconds} s")


if __name__ == "__main__":
    main()
