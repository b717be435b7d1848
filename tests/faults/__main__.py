"""`python -m tests.faults`: the fault suite for a stated time; exit code 1 when anything was wrong."""

import argparse
import sys
import tempfile
from pathlib import Path

from loadtest.measurement.provenance import provenance
from tests.faults.report import page
from tests.faults.suite import IS_NATIVE, Plan, run


def main() -> int:
    """Run, tell, and write the page where one is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/kvasir-9m"), help="what is served")
    parser.add_argument(
        "--dtype",
        choices=list(IS_NATIVE),
        default="float64",
        help="float64: PyTorch's kernels; float32: our own, which need a compiler and have to give the same bits",
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="how long faults are injected")
    parser.add_argument("--seed", type=int, default=1, help="of questions, clients and faults")
    parser.add_argument("--clients", type=int, default=16, help="clients at a time")
    parser.add_argument("--departures", type=int, default=1000, help="clients that leave, after the faults")
    parser.add_argument("--report", type=Path, help="page to write")
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
        print(f"{arguments.report}: {result.tally.num_compared} answers, {len(result.complaints)} complaints")
    for complaint in result.complaints:
        print(complaint, file=sys.stderr)
    return 1 if result.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
