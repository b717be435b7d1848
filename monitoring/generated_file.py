"""Write a generated file, or check that it is current."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def write_or_check(path: Path, text: str, *, command: str, argv: Sequence[str] | None = None) -> int:
    """Write `text` to the file, or with `--check` only compare. Return the exit code: 0; 1 if they differ."""
    parser = argparse.ArgumentParser(prog=command, description=f"Write {path.name}.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with code 1 if the file is out of date"
    )
    if not parser.parse_args(argv).check:
        path.write_text(text)
        return 0
    if path.read_text() == text:
        return 0
    print(f"{path.name} is out of date; run `{command}` to update it", file=sys.stderr)
    return 1
