"""`python -m tests.faults`: run the fault suite for a given time; exit code 1 if an error was found."""

import argparse
import sys
import tempfile
from pathlib import Path

from loadtest.measurement.benchmark_program import provenance
from tests.faults.report import page
from tests.faults.suite import IS_NATIVE, Plan, run


def main() -> int:
    """Run the suite, print the errors found, and write the page to --report or to stdout."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("checkpoints/kvasir-20m"), help="checkpoint that the server serves"
    )
    parser.add_argument(
        "--dtype",
        choices=list(IS_NATIVE),
        default="float64",
        help="float64: PyTorch's kernels; float32: native kernels, whose responses must be bitwise equal",
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="duration of the fault injection, in seconds")
    parser.add_argument("--seed", type=int, default=1, help="random seed of requests, clients and faults")
    parser.add_argument("--clients", type=int, default=16, help="concurrent clients during the faults")
    parser.add_argument("--departures", type=int, default=1000, help="clients that disconnect early, after the faults")
    parser.add_argument("--report", type=Path, help="file to write the page to; without it, the page is printed")
    arguments = parser.parse_args()
    plan = Plan(
        dtype=arguments.dtype,
        seconds=arguments.seconds,
        seed=arguments.seed,
        num_questions=45,
        num_clients=arguments.clients,
        num_departures=arguments.departures,
        flood=100,
        mean_seconds=4.0,
    )
    where = provenance("python -m tests.faults", sys.argv[1:])
    with tempfile.TemporaryDirectory() as directory:
        result = run(arguments.checkpoint, Path(directory), plan)
    text = page(result, where)
    if arguments.report is None:
        print(text)
    else:
        arguments.report.write_text(text, encoding="utf-8")
        print(
            f"{arguments.report}: {result.tally.num_compared} responses compared, {len(result.complaints)} errors found"
        )
    for complaint in result.complaints:
        print(complaint, file=sys.stderr)
    return 1 if result.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
