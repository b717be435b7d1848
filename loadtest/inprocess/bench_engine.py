"""`kvasir bench`: the engine in-process, swept over batch size, context and prompt length.

    kvasir bench --checkpoint checkpoints/NAME --out docs/results/engine.json
    kvasir bench --shape S -- --dtype bfloat16 --threads 2

Decode: `batch` sequences of `context` tokens each, which share no KV-cache block, are timed over a few steps. In
each step every sequence gets a token. Their prompts are computed once and then come from the prefix cache.

Prompts: each length alone in the engine, without a cached prefix, until its first token.

Repeats go round the whole sweep, so that a slow minute of the machine affects every point alike. Each round also
probes the machine's limits (`loadtest.measurement.roofline`), which give the share of the roofline
(`loadtest.measurement.step_work`).
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ByteSize
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from loadtest.client.workload import tales
from loadtest.inprocess.bench_arguments import PROGRAM, read_arguments, refuse
from loadtest.inprocess.closed_loop import EngineRun, run_closed
from loadtest.inprocess.engine import InProcess
from loadtest.inprocess.engine_points import DecodePoint, PromptPoint
from loadtest.measurement.model_shapes import write_random_checkpoint
from loadtest.measurement.provenance import provenance, quiet_or_warned, tell
from loadtest.measurement.roofline import Roofline
from loadtest.measurement.spread import Spread
from loadtest.measurement.step_work import FORMULAS, WEIGHT_BYTES, Machine, WorkFormula
from model.checkpoint.manifest import CheckpointError, read_manifest
from model.config import ModelConfig
from model.sampling.params import SamplingParams
from service.config.settings import ModelSettings, SettingsError
from service.ipc.messages import Submit

_PROMPT_TOKENS_A_REPEAT = 256  # several short prompts are averaged
_MIB = 2**20


class Prompts:
    """Prompts of an exact number of tokens, cut from the tales. No two share their first block."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._starts = itertools.count()

    def next(self, num_tokens: int) -> tuple[int, ...]:
        """Return the next prompt. The stride is prime to the text's length, or nearly, which keeps the starts apart."""
        count = len(self._token_ids)
        start = next(self._starts) * 7919 % count
        return tuple(self._token_ids[(start + offset) % count] for offset in range(num_tokens))


class Sweep:
    """Runner of the sweep: the engine, the probe, and the measured points."""

    def __init__(self, contestant: InProcess, roofline: Roofline) -> None:
        self._engine = contestant.engine
        self._roofline = roofline
        self._prompts = Prompts(contestant.token_ids(tales()))
        self._held: list[tuple[int, ...]] = []  # prompts from which the sequences of a batch begin
        self._uids = (f"bench-{number}" for number in itertools.count())
        self.machines: list[Machine] = []

    def probe(self) -> None:
        """Probe the machine's limits again, at the beginning of a round."""
        self.machines.append(self._roofline.probe())

    def measure(self, point: DecodePoint | PromptPoint) -> None:
        """Add one repeat to a point."""
        if isinstance(point, PromptPoint):
            count = max(1, _PROMPT_TOKENS_A_REPEAT // point.prompt_tokens)
            runs = [self._run([self._prompts.next(point.prompt_tokens)], 1) for _ in range(count)]
            return point.add(runs, self.machines[-1])
        return point.add(self._run(self._beginnings(point), point.output_tokens), self.machines[-1])

    def warm_up(self, points: Sequence[DecodePoint | PromptPoint]) -> None:
        """Compute the longest prompts once, and a few steps of every batch, because first runs are slower."""
        decode = [point for point in points if isinstance(point, DecodePoint)]
        self._held = [
            self._prompts.next(max(point.prompt_tokens for point in decode))
            for _ in range(max(point.batch_size for point in decode))
        ]
        for point in sorted(decode, key=lambda point: (point.prompt_tokens, point.batch_size), reverse=True):
            self._run(self._beginnings(point), 4)

    def _beginnings(self, point: DecodePoint) -> list[tuple[int, ...]]:
        return [prompt[: point.prompt_tokens] for prompt in self._held[: point.batch_size]]

    def _run(self, prompts: Sequence[tuple[int, ...]], output_tokens: int) -> EngineRun:
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        submits = [
            Submit(
                uid=next(self._uids),
                attempt=0,
                prompt_token_ids=prompt,
                prior_token_ids=(),
                params=params,
                arrival_seconds=time.monotonic(),
                deadline_seconds=None,
            )
            for prompt in prompts
        ]
        return run_closed(self._engine, submits, num_streams=len(prompts))


def make_points(
    arguments: argparse.Namespace, settings: ModelSettings, formula: WorkFormula, max_context_tokens: int
) -> list[DecodePoint | PromptPoint]:
    """Return the requested sweep. Of lists that were not given, only values that fit the model are used.

    Raises:
        ValueError: a point does not fit the model's context, or the engine's batch.
    """
    points: list[DecodePoint | PromptPoint] = []
    for context, batch in itertools.product(arguments.context, arguments.batch):
        if batch > settings.max_num_running:
            raise ValueError(f"a batch of {batch} needs -- --max-num-running {batch}")
        # All of a prompt but one block comes from the cache. This many steps pass until the last sequence has its
        # first token.
        output = arguments.steps + 1 + batch * (settings.block_size + 1) // settings.max_batched_tokens
        prompt = min(context - output // 2, max_context_tokens - output)
        if prompt >= 1 and prompt + output <= max_context_tokens and context <= max_context_tokens:
            length = prompt + output // 2
            work = formula.decode(batch_size=batch, context_length=length)
            points.append(DecodePoint(batch, length, prompt, output, work))
        elif "context" not in arguments.usual:
            raise ValueError(
                f"{arguments.steps} steps at a context of {context} tokens do not fit the model's "
                f"{max_context_tokens}, or are more than {context}; choose other --context or --steps"
            )
    for prompt in arguments.prompt_tokens:
        if prompt < max_context_tokens:
            work = formula.prompt(num_tokens=prompt, tokens_per_step=settings.max_batched_tokens)
            points.append(PromptPoint(prompt, work))
        elif "prompt_tokens" not in arguments.usual:
            raise ValueError(f"a prompt of {prompt} tokens does not fit the model's context of {max_context_tokens}")
    if not any(isinstance(point, DecodePoint) for point in points):
        raise ValueError(f"{arguments.steps} steps do not fit the model's context of {max_context_tokens}")
    return points


def _progress() -> Progress:
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def with_room(arguments: argparse.Namespace, settings: ModelSettings, config: ModelConfig) -> ModelSettings:
    """Return the settings with a KV-cache large enough for the sweep, if its size is `auto`.

    The size covers all sequences at the longest context, and half as much again for prompts computed in between.
    """
    if settings.kv_cache_memory != "auto":
        return settings
    longest = min(max(arguments.context), config.max_context_length) + 2 * arguments.steps
    tokens = max(max(arguments.batch) * longest * 3 // 2, config.max_context_length + settings.block_size)
    cache_dtype = settings.dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    value_bytes = WEIGHT_BYTES.get(cache_dtype, WEIGHT_BYTES["float32"])  # auto is at most float32
    size = tokens * config.kv_bytes_per_token(value_bytes)
    return settings.model_copy(update={"kv_cache_memory": ByteSize((-(-size // _MIB) + 1) * _MIB)})


def measure(arguments: argparse.Namespace, settings: ModelSettings) -> dict[str, Any]:
    """Run the sweep. Raises `ValueError`, or its subclass `CheckpointError`, if it cannot run."""
    settings = with_room(arguments, settings, read_manifest(settings.checkpoint).config)
    contestant = InProcess.open(settings)
    facts = contestant.facts
    formula = WorkFormula(
        config=contestant.manifest.config,
        weight_type=facts["weights"],
        kv_value_bytes=WEIGHT_BYTES[facts["kv_cache_dtype"]],
    )
    points = make_points(arguments, settings, formula, contestant.max_context_tokens)
    sweep = Sweep(contestant, Roofline(facts["weights"], facts["device"]))
    with _progress() as progress:
        task = progress.add_task("warm-up", total=arguments.repeats * len(points))
        sweep.warm_up(points)
        for _ in range(arguments.repeats):
            sweep.probe()
            for point in points:
                progress.update(task, description=point.label)
                sweep.measure(point)
                progress.advance(task)
    return {
        "kind": "engine",
        "model": facts,
        "settings": {"repeats": arguments.repeats, "steps": arguments.steps, "temperature": 0.0},
        "engine_settings": settings.model_dump(mode="json", exclude={"checkpoint", "cache_dir"}),
        "roofline": {
            "weights": facts["weights"],
            "gb_per_second": Spread(tuple(m.bytes_per_second / 1e9 for m in sweep.machines)).to_dict(),
            "gflops": Spread(tuple(m.flops_per_second / 1e9 for m in sweep.machines)).to_dict(),
            "formulas": FORMULAS,
        },
        "decode": [point.to_dict() for point in points if isinstance(point, DecodePoint)],
        "prompts": [point.to_dict() for point in points if isinstance(point, PromptPoint)],
    }


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield the tables for the terminal: medians, with minimum and maximum of the step times."""
    model, machine = result["model"], result["roofline"]
    title = f"{model['name']}, {model['dtype']}, weights {model['weights']}, on {model['device']}"
    decode = Table(title=title)
    for heading in ("batch", "context", "ms a step", "tokens/s", "MB", "GFLOP", "of the roofline"):
        decode.add_column(heading, justify="right")
    for point in result["decode"]:
        step = point["step_ms"]
        decode.add_row(
            str(point["batch_size"]),
            str(point["context_length"]),
            f"{step['median']:.2f} ({step['min']:.2f}–{step['max']:.2f})",
            f"{point['tokens_per_second']['median']:.0f}",
            f"{point['bytes'] / 1e6:.0f}",
            f"{point['flops'] / 1e9:.2f}",
            f"{point['of_the_roofline']['median']:.2f}",
        )
    yield decode
    prompts = Table(
        caption=f"{machine['gb_per_second']['median']:.0f} GB/s and {machine['gflops']['median']:.0f} GFLOP/s"
        f" of {machine['weights']} are the roofline"
    )
    for heading in ("prompt", "TTFT ms", "tokens/s", "GFLOP", "of the roofline"):
        prompts.add_column(heading, justify="right")
    for point in result["prompts"]:
        ttft = point["ttft_ms"]
        prompts.add_row(
            str(point["prompt_tokens"]),
            f"{ttft['median']:.1f} ({ttft['min']:.1f}–{ttft['max']:.1f})",
            f"{point['tokens_per_second']['median']:.0f}",
            f"{point['flops'] / 1e9:.2f}",
            f"{point['of_the_roofline']['median']:.2f}",
        )
    yield prompts


@contextmanager
def _with_model(arguments: argparse.Namespace, settings: ModelSettings) -> Iterator[ModelSettings]:
    """Yield settings with an existing model. For a shape, a temporary checkpoint is written."""
    if arguments.shape is None:
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as scratch:
        made = write_random_checkpoint(Path(scratch) / "model", arguments.shape)
        yield settings.model_copy(update={"checkpoint": made})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show tables, write JSON. Return the exit code: 0; 2 for arguments that cannot be measured."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments, settings = read_arguments(given)
    try:
        facts = provenance(PROGRAM, given) | {"other_work_cores": quiet_or_warned(PROGRAM)}
        began = time.perf_counter()
        with _with_model(arguments, settings) as named:
            result = facts | measure(arguments, named)
        result["took_seconds"] = round(time.perf_counter() - began, 1)
    except (SettingsError, CheckpointError, ValueError) as error:
        refuse(str(error))
    Console().print(*tables(result))
    if arguments.out is not None:
        tell(result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
