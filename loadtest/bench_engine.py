"""`kvasir bench`: the engine in-process, swept over batch size and prompt length.

    kvasir bench --checkpoint checkpoints/NAME --out docs/results/engine.json

A point is one wave: `batch` sequences submitted at once, each of `prompt` tokens that no sequence had before, each
generating `output` tokens greedily. Repeats go round the whole sweep, so that a slow minute of the machine touches
every point alike. Beside each engine figure, in the same round, the bare model decodes a batch of the same size at
the same context: the ratio is what the engine leaves of it.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from loadtest.bench_arguments import PROGRAM, read_arguments, refuse
from loadtest.closed_loop import EngineRun, run_closed
from loadtest.in_process import BareModel, InProcess
from loadtest.provenance import provenance, quiet_or_warned, tell
from loadtest.spread import Spread
from loadtest.workload import tales
from model.manifest import CheckpointError
from model.sampling_params import SamplingParams
from service.messages import Submit
from service.settings import ModelSettings, SettingsError

_BARE_SECONDS = 0.3


@dataclass(slots=True)
class Point:
    """One batch size at one prompt length, and what its repeats showed."""

    batch_size: int
    prompt_tokens: int
    output_tokens: int
    runs: list[EngineRun] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.batch_size} × {self.prompt_tokens}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        decode = [run.decode_tokens_per_second for run in self.runs]
        return {
            "batch_size": self.batch_size,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "tokens_per_second": _spread(run.tokens_per_second for run in self.runs),
            "prefill_tokens_per_second": _spread(run.prefill_tokens_per_second for run in self.runs),
            "decode_tokens_per_second": _spread(decode),
            "bare_decode_tokens_per_second": _spread(self.bare),
            "decode_ratio": Spread.of_ratios(decode, self.bare).to_dict(),
            "ttft_ms": _spread(1e3 * float(np.median(run.ttft_seconds)) for run in self.runs),
        }


def _spread(values: Iterator[float] | Sequence[float]) -> dict[str, Any]:
    return Spread(tuple(values)).to_dict()


class Prompts:
    """Prompts of an exact number of tokens, no two alike from their first block on: windows of the tales."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._starts = itertools.count()

    def next(self, num_tokens: int) -> tuple[int, ...]:
        """The next prompt. A stride through the text, prime to its length or nearly so, keeps the starts apart."""
        count = len(self._token_ids)
        start = next(self._starts) * 7919 % count
        return tuple(self._token_ids[(start + offset) % count] for offset in range(num_tokens))


class Sweep:
    """The engine, the bare model, and the points to measure."""

    def __init__(self, contestant: InProcess, points: Sequence[Point]) -> None:
        self._engine = contestant.engine
        self._bare: BareModel = contestant.bare_model()
        self._prompts = Prompts(contestant.token_ids(tales()))
        self._uids = (f"bench-{number}" for number in itertools.count())
        self.points = points

    def measure(self, point: Point) -> None:
        """Add one repeat to a point."""
        point.runs.append(self._run(point.batch_size, point.prompt_tokens, point.output_tokens))
        context = point.prompt_tokens + point.output_tokens // 2
        point.bare.append(
            self._bare.decode_tokens_per_second(
                batch_size=point.batch_size, context_length=context, seconds=_BARE_SECONDS
            )
        )

    def warm_up(self) -> None:
        """One small run of every batch size: the first is slow, and nobody's steady state."""
        for batch_size in sorted({point.batch_size for point in self.points}):
            self._run(batch_size, 16, 4)

    def _run(self, batch_size: int, prompt_tokens: int, output_tokens: int) -> EngineRun:
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        submits = [
            Submit(
                uid=next(self._uids),
                attempt=0,
                prompt_token_ids=self._prompts.next(prompt_tokens),
                prior_token_ids=(),
                params=params,
                arrival_seconds=time.monotonic(),
                deadline_seconds=None,
            )
            for _ in range(batch_size)
        ]
        return run_closed(self._engine, submits, num_streams=batch_size)


def make_points(arguments: argparse.Namespace, max_context_tokens: int, max_num_running: int) -> list[Point]:
    """The sweep that was asked for.

    Raises:
        ValueError: a point does not fit the model's context, or the engine's batch.
    """
    points = []
    for prompt, batch in itertools.product(arguments.prompt_tokens, arguments.batch):
        if min(prompt, batch) < 1 or arguments.output_tokens < 2:
            raise ValueError("batch and prompt must be at least 1, output at least 2")
        if prompt + arguments.output_tokens > max_context_tokens:
            total = prompt + arguments.output_tokens
            raise ValueError(f"prompt and output are {total} tokens, the model's context is {max_context_tokens}")
        if batch > max_num_running:
            raise ValueError(f"a batch of {batch} needs -- --max-num-running {batch}")
        points.append(Point(batch, prompt, arguments.output_tokens))
    return points


def _progress() -> Progress:
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def measure(arguments: argparse.Namespace, settings: ModelSettings) -> dict[str, Any]:
    """Run the sweep. Raises `ValueError` for what cannot be done, `CheckpointError` being one."""
    contestant = InProcess.open(settings)
    points = make_points(arguments, contestant.max_context_tokens, settings.max_num_running)
    sweep = Sweep(contestant, points)
    with _progress() as progress:
        task = progress.add_task("warm-up", total=arguments.repeats * len(points))
        sweep.warm_up()
        for _, point in itertools.product(range(arguments.repeats), points):
            progress.update(task, description=point.label)
            sweep.measure(point)
            progress.advance(task)
    return {
        "kind": "engine",
        "model": contestant.facts,
        "settings": {"repeats": arguments.repeats, "temperature": 0.0},
        "points": [point.to_dict() for point in points],
    }


def table(result: dict[str, Any]) -> Table:
    """The sweep for the terminal: medians, with the smallest and largest of the whole wave's throughput."""
    made = Table(title=f"{result['model']['name']}, {result['model']['dtype']} on {result['model']['device']}")
    for heading in ("batch", "prompt", "tokens/s", "prefill/s", "decode/s", "of the bare model", "TTFT ms"):
        made.add_column(heading, justify="right")
    for point in result["points"]:
        whole = point["tokens_per_second"]
        made.add_row(
            str(point["batch_size"]),
            str(point["prompt_tokens"]),
            f"{whole['median']:.0f} ({whole['min']:.0f}–{whole['max']:.0f})",
            *(f"{point[name]['median']:.0f}" for name in ("prefill_tokens_per_second", "decode_tokens_per_second")),
            f"{point['decode_ratio']['median']:.2f}",
            f"{point['ttft_ms']['median']:.1f}",
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show a table, write JSON. Returns the exit code: 0, 2 for what cannot be measured."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments, settings = read_arguments(given)
    try:
        facts = provenance(PROGRAM, given) | {"other_work_cores": quiet_or_warned(PROGRAM)}
        began = time.perf_counter()
        result = facts | measure(arguments, settings)
        result["took_seconds"] = round(time.perf_counter() - began, 1)
    except (SettingsError, CheckpointError, ValueError) as error:
        refuse(str(error))
    Console().print(table(result))
    if arguments.out is not None:
        tell(result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
