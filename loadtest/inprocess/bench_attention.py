"""Benchmark of every attention mechanism, trained and served: docs/results/attention.json.

    python -m loadtest.inprocess.bench_attention train --seeds 1 2    trains missing runs: half an hour per seed
    python -m loadtest.inprocess.bench_attention speed                trains and serves all mechanisms in turn: minutes

An interrupted `train` continues with the same command. Each phase writes its own part of the file and keeps the
other. `python -m loadtest.docgen.attention_page` then writes the page.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.inprocess.attention_speed import measure
from loadtest.inprocess.attention_training import collect, train_all
from loadtest.measurement.provenance import provenance, quiet_or_warned, tell
from model.checkpoint.manifest import CheckpointError

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "docs" / "results" / "attention.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.inprocess.bench_attention", description=__doc__.split("\n")[0]
    )
    phases = parser.add_subparsers(dest="phase", required=True)
    train = phases.add_parser("train", help="train every mechanism and collect the losses")
    train.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="N", help="seeds to train (default: 1)")
    speed = phases.add_parser("speed", help="measure every trained mechanism")
    speed.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the runs to serve (default: 1)")
    speed.add_argument("--rounds", type=int, default=7, metavar="N", help="repeats (default: 7)")
    speed.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: 1)")
    for phase in (train, speed):
        phase.add_argument(
            "--runs", type=Path, default=Path("runs/attention"), metavar="DIR", help="default: %(default)s"
        )
        phase.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="default: docs/results/attention.json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a phase and write its part of the JSON. Return the exit code: 0; 1 if the phase failed."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    arguments = parser.parse_args(given)
    facts = provenance(parser.prog, given) | {"other_work_cores": quiet_or_warned(parser.prog)}
    began = time.perf_counter()
    try:
        result = facts | _run(arguments)
    except (CheckpointError, ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    result["took_seconds"] = round(time.perf_counter() - began, 1)
    both: dict[str, Any] = {"kind": "attention"}
    if arguments.out.is_file():
        both = json.loads(arguments.out.read_text(encoding="utf-8"))
    both[arguments.phase] = result
    tell(both, arguments.out)
    return 0


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.phase == "train":
        train_all(arguments.runs, arguments.seeds)
        return collect(arguments.runs, arguments.seeds)
    return measure(
        arguments.runs, seed=arguments.seed, rounds=arguments.rounds, threads=arguments.threads, report=_report
    )


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
