"""`kvasir bench`."""

import importlib
from collections.abc import Sequence

from loadtest.bench_arguments import read_arguments


def main(argv: Sequence[str]) -> int:
    """Measure. The arguments are read here first, so that a typo costs no import of torch."""
    read_arguments(argv)
    code: int = importlib.import_module("loadtest.bench_engine").main(argv)
    return code
