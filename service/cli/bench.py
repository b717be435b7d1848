"""Command `kvasir bench`."""

import importlib
from collections.abc import Sequence

from loadtest.inprocess.bench_arguments import read_arguments


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Arguments are parsed before torch is imported, so that a typo fails without delay."""
    read_arguments(argv)
    code: int = importlib.import_module("loadtest.inprocess.bench_engine").main(argv)
    return code
