"""Common parts of all benchmark programs: arguments, provenance, duration, JSON output and exit code."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.measurement.provenance import measure_other_work, provenance, write_result


class MeasurementFailed(RuntimeError):
    """Failure of the engine, service or other program under measurement. The message is the reason."""


def benchmark_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return an argument parser for `python -m MODULE`, with the option `--out`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog="Arguments after -- are settings of `kvasir serve`, for example: -- --threads 1 --dtype bfloat16",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON output file (default: standard output)")
    return parser


def read_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. Adds `serve`, the arguments after `--`, and `given`, all arguments, to the result."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    arguments = parser.parse_args(given[:split])
    arguments.given, arguments.serve = given, given[split + 1 :]
    return arguments


def run_benchmark(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    measure: Callable[[], dict[str, Any]],
    *,
    prints_json: bool = True,
    part: str | None = None,
) -> int:
    """Call `measure`, and write its figures with their provenance as JSON to the file `--out` or to standard output.

    prints_json: print the JSON if `--out` is missing.
    part: field of the JSON file that is replaced; None replaces the whole file.

    Returns the exit code: 0; 1 after `MeasurementFailed`. A `ValueError` exits with 2, as invalid arguments do.
    """
    facts = provenance(parser.prog, arguments.given) | {"other_work_cores": measure_other_work(parser.prog)}
    began = time.perf_counter()
    try:
        result = measure()
    except MeasurementFailed as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))
    result = facts | {"took_seconds": round(time.perf_counter() - began, 1)} | result
    if part is not None:
        result = (json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}) | {part: result}
    if prints_json or arguments.out is not None:
        write_result(result, arguments.out)
    return 0


def show(label: str) -> None:
    """Print the name of the measurement that begins now to standard error."""
    print(f"measuring: {label}", file=sys.stderr, flush=True)
