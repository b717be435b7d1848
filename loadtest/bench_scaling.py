"""How the service scales, with measured exponents.

    python -m loadtest.bench_scaling --checkpoint checkpoints/NAME --out docs/results/scaling.json

A decode step over batch and over context; the KV-cache's resident memory over tokens; the time to the first token over
the length of a beginning that an earlier prompt had, beside a prompt as long as the rest; `kvasir serve`'s start over
the size of its checkpoint, beside the time to read its files. What follows `--` are settings, of the engine here and of
the services that are started.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.bench_arguments import split_at_dashes
from loadtest.in_process import InProcess
from loadtest.provenance import provenance, quiet_or_warned, tell
from loadtest.scaling_engine import Prefixes, Steps, kv_memory
from loadtest.scaling_start import Starts
from loadtest.service_process import ServiceFailed
from model.checkpoint_files import CheckpointError
from service.settings import ServeSettings, SettingsError, read_settings

PROGRAM = "python -m loadtest.bench_scaling"
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (64, 128, 256, 512, 960)
_KV_TOKENS = (32_768, 65_536, 131_072, 262_144)
_PROMPT = 768
_SHARED = (0, 128, 256, 384, 512, 640, 704)


def measure(arguments: argparse.Namespace, serve: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Everything. Starts come last: they need the machine alone, and nothing here computes meanwhile."""
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
        epilog="What follows -- are settings as `kvasir serve` knows them, like: -- --threads 1 --dtype bfloat16",
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="of the engine's part")
    add("--out", type=Path, metavar="FILE", help="write JSON there instead of to standard output")
    add("--repeats", type=int, default=5, metavar="N", help="rounds of the engine's part (default: 5)")
    add("--start-repeats", type=int, default=3, metavar="N", help="starts of each size (default: 3)")
    usual = (100, 300, 1000)
    add("--sizes", type=int, nargs="+", default=usual, metavar="MB", help="checkpoints (default: 100 300 1000)")
    add("--scratch", type=Path, metavar="DIR", help="where they are written, and removed (default: TMPDIR)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON. Exit codes: 0, 1 where a service failed, 2 for what cannot be measured."""
    given = list(sys.argv[1:] if argv is None else argv)
    own, serve = split_at_dashes(given)
    parser = _parser()
    arguments = parser.parse_args(own)
    if min(arguments.repeats, arguments.start_repeats, *arguments.sizes) < 1 or len(set(arguments.sizes)) < 2:
        parser.error("repeats and sizes are at least 1, and there are two sizes at least")
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
