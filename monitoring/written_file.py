"""A file that a program writes: write it, or say that it is not what the program would write."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def write_or_check(path: Path, text: str, *, command: str, argv: Sequence[str] | None = None) -> int:
    """Write `text`; with `--check`, compare instead. Returns the exit code: 1 when the file is out of date."""
    parser = argparse.ArgumentParser(prog=command, description=f"Write {path.name}.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when it is out of date")
    if not parser.parse_args(argv).check:
        path.write_text(text)
        return 0
    if path.read_text() == text:
        return 0
    print(f"{path.name} is out of date; `{command}` writes it anew", file=sys.stderr)
    return 1
