"""Benchmark of the service's scaling, with fitted exponents.

    python -m loadtest.scenarios.bench_scaling --checkpoint checkpoints/NAME --out docs/results/scaling.json

It measures:

- step time of a decode step over batch size and over context length;
- resident memory of the KV-cache over tokens;
- TTFT over the length of a cached prefix, compared with a prompt as long as the rest;
- start time of `kvasir serve` over the size of its checkpoint, compared with the time to read its files.

Arguments after `--` are settings of the engine and of the services that are started.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.inprocess.bench_arguments import split_at_dashes
from loadtest.inprocess.engine import InProcess
from loadtest.measurement.provenance import provenance, quiet_or_warned, tell
from loadtest.scenarios.scaling_engine import Prefixes, Steps, kv_memory
from loadtest.scenarios.scaling_start import Starts
from loadtest.scenarios.service_process import ServiceFailed
from model.io.checkpoint_files import CheckpointError
from service.config.settings import ServeSettings, SettingsError, read_settings

PROGRAM = "python -m loadtest.scenarios.bench_scaling"
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (64, 128, 256, 512, 960)
_KV_TOKENS = (32_768, 65_536, 131_072, 262_144)
_PROMPT = 768
_SHARED = (0, 128, 256, 384, 512, 640, 704)


def measure(arguments: argparse.Namespace, serve: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Run all measurements. Starts come last, because they need the machine to themselves."""
    settings = read_settings(
        ServeSettings, ["--checkpoint", str(arguments.checkpoint), *serve], command="serve", summary=""
    )
    sizes = [10**6 * megabytes for megabytes in arguments.sizes]
    starts = Starts(arguments.scratch, sizes, repeats=arguments.start_repeats, serve=serve)
    contestant = InProcess.open(settings)
    rounds = arguments.repeats * (len(_BATCHES) + len(_CONTEXTS) + len(_SHARED))
    task = progress.add_task("warm-up", total=rounds + arguments.start_repeats * len(arguments.sizes) + 1)

    def follow(labels: Iterable[str]) -> None:
        for label in labels:
            progress.update(task, description=label)
            progress.advance(task)

    steps, prefixes = Steps(contestant, _BATCHES, _CONTEXTS), Prefixes(contestant, _PROMPT, _SHARED)
    steps.warm_up()
    for _ in range(arguments.repeats):
        follow(steps.round())
        follow(prefixes.round())
    progress.update(task, description="KV memory")
    memory = kv_memory(contestant.manifest.config, contestant.built.kv_cache_dtype, _KV_TOKENS)
    progress.advance(task)
    follow(starts.run())
    return {
        "kind": "scaling",
        "model": contestant.facts,
        "settings": {"repeats": arguments.repeats, "start_repeats": arguments.start_repeats},
        "steps": steps.to_dict(),
        "kv_memory": memory,
        "prefixes": prefixes.to_dict(),
        "starts": starts.to_dict(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=(__doc__ or "").split("\n")[0],
        epilog="Arguments after -- are settings of `kvasir serve`, for example: -- --threads 1 --dtype bfloat16",
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="checkpoint of the engine's measurements")
    add("--out", type=Path, metavar="FILE", help="JSON output file (default: standard output)")
    add("--repeats", type=int, default=5, metavar="N", help="repeats of the engine's measurements (default: 5)")
    add("--start-repeats", type=int, default=3, metavar="N", help="starts per checkpoint size (default: 3)")
    usual = (100, 300, 1000)
    add(
        "--sizes",
        type=int,
        nargs="+",
        default=usual,
        metavar="MB",
        help="sizes of the temporary checkpoints (default: 100 300 1000)",
    )
    add("--scratch", type=Path, metavar="DIR", help="directory for the temporary checkpoints (default: TMPDIR)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Return the exit code: 0; 1 if a service failed; 2 for invalid arguments."""
    given = list(sys.argv[1:] if argv is None else argv)
    own, serve = split_at_dashes(given)
    parser = _parser()
    arguments = parser.parse_args(own)
    if min(arguments.repeats, arguments.start_repeats, *arguments.sizes) < 1 or len(set(arguments.sizes)) < 2:
        parser.error("repeats and sizes must be at least 1, and --sizes needs two different values")
    facts = provenance(parser.prog, given) | {"other_work_cores": quiet_or_warned(parser.prog)}
    columns = (TextColumn("{task.description:>18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            began = time.perf_counter()
            result = measure(arguments, serve, progress)
            result["took_seconds"] = round(time.perf_counter() - began, 1)
    except (SettingsError, CheckpointError, ValueError, OSError) as error:
        parser.error(str(error))
    except ServiceFailed as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    tell(facts | result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
