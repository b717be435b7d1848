"""Command line of the benchmarks that start a service: a table of options in, one JSON file of results out."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loadtest.measurement.benchmark_program import benchmark_parser, read_arguments, run_benchmark


def run_scenario(
    name: str,
    description: str,
    options: Mapping[str, tuple[Any, str]],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    argv: Sequence[str] | None,
) -> int:
    """Run a benchmark program with its command line, and write its results as JSON. Return the exit code.

    Exit codes: 0; 1 if the service failed; 2 for invalid arguments, or a `ValueError` of `measure`.

    name: module in `loadtest.scenarios`.
    options: default and help by name. The default is a list for several values, or a type if the option is required.
    measure: returns the results for the parsed options.
    """
    parser = benchmark_parser(f"loadtest.scenarios.{name}", description)
    for option, (default, text) in options.items():
        if isinstance(default, type):
            parser.add_argument(f"--{option}", type=default, required=True, metavar=option.upper(), help=text)
            continue
        is_list, text = isinstance(default, list), f"{text} (default: %(default)s)"
        kind = type(default[0] if is_list else default)
        nargs = "+" if is_list else None
        parser.add_argument(f"--{option}", type=kind, nargs=nargs, default=default, metavar="N", help=text)
    arguments = read_arguments(parser, argv)
    return run_benchmark(parser, arguments, lambda: measure(arguments))
