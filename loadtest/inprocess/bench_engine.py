"""Benchmark of the engine in this process: decode steps by batch size and context length, prefill by prompt length.

Decode: `batch` sequences of `context` tokens each, which share no KV-cache block, are timed over a few steps. Their
prompts are computed once and then come from the prefix cache. Prefill: one prompt alone in the engine, without a
cached prefix, is timed until its first token. Each repeat measures all sizes once, so that a slow minute of the machine
affects all sizes alike.
"""

import argparse
import dataclasses
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.inprocess.engine import EngineRun, InProcess
from loadtest.measurement.benchmark_program import save_result, show
from loadtest.measurement.figures import Column, ratio_spread, spread, table
from loadtest.measurement.model_shapes import write_random_checkpoint
from loadtest.measurement.roofline import WEIGHT_BYTES, Machine, Roofline, Work, WorkFormula
from service.config.settings import ModelSettings

_PROMPT_TOKENS_PER_REPEAT = 256  # several short prompts are averaged
DECODE_COLUMNS = (
    Column("sequences", "batch_size"),
    Column("context", "context_length"),
    Column("ms per step", "step_ms", ".2f"),
    Column("tokens/s", "tokens_per_second", ".0f"),
    Column("MB", "bytes", ".0f", 1e-6),
    Column("GFLOP", "flops", ".2f", 1e-9),
    Column("share of the roofline", "of_the_roofline", ".2f"),
)
PROMPT_COLUMNS = (
    Column("prompt tokens", "prompt_tokens"),
    Column("TTFT ms", "ttft_ms", ".1f"),
    Column("tokens/s", "tokens_per_second", ".0f"),
    Column("GFLOP", "flops", ".2f", 1e-9),
    Column("share of the roofline", "of_the_roofline", ".2f"),
)


@dataclass(slots=True)
class Point:
    """One measured size: decode steps of a batch at a context length, or prefill of one prompt (batch size 0).

    context_length: mean tokens of a sequence over the timed steps.
    work: bytes and FLOPs of one decode step, or of the prompt's prefill.
    seconds, bounds: per repeat, the time of a step or prefill, and its lower bound by the machine's measured limits.
    """

    batch_size: int
    context_length: int
    prompt_tokens: int
    output_tokens: int
    work: Work
    seconds: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes, and the measured time, tokens/s and share of the roofline, JSON-ready."""
        sizes = {"batch_size": self.batch_size, "context_length": self.context_length}
        num_tokens = self.batch_size or self.prompt_tokens
        return {
            **(sizes if self.batch_size else {"prompt_tokens": self.prompt_tokens}),
            **dataclasses.asdict(self.work),
            "step_ms" if self.batch_size else "ttft_ms": spread(1e3 * seconds for seconds in self.seconds),
            "tokens_per_second": spread(num_tokens / seconds for seconds in self.seconds),
            "of_the_roofline": ratio_spread(self.bounds, self.seconds),
        }


class Sweep:
    """Runner of timed decode steps and timed prefills on one engine in this process."""

    def __init__(self, contestant: InProcess) -> None:
        self._contestant = contestant
        self._held: list[list[int]] = []  # prompts from which the sequences of a batch begin

    def warm_up(self, points: Sequence[Point]) -> None:
        """Run a few steps of every decode point: first runs are slower, and the prefix cache gets the prompts."""
        decode = [point for point in points if point.batch_size]
        longest = max(point.prompt_tokens for point in decode)
        self._held = [self._contestant.random_prompt(longest) for _ in range(max(point.batch_size for point in decode))]
        for point in sorted(decode, key=lambda point: (point.prompt_tokens, point.batch_size), reverse=True):
            self._decode(point, 4)

    def measure(self, point: Point, machine: Machine) -> None:
        """Measure a point once, and append the time of a step or prefill and its lower bound to the point.

        Raises ValueError if the sequences of the point's batch never ran at the same time.
        """
        if point.batch_size:
            seconds = self._decode(point, point.output_tokens).full_step_seconds
        else:
            count = max(1, _PROMPT_TOKENS_PER_REPEAT // point.prompt_tokens)
            prompts = [self._contestant.random_prompt(point.prompt_tokens) for _ in range(count)]
            seconds = sum(self._contestant.complete([prompt], 1).ttft_seconds[0] for prompt in prompts) / count
        point.seconds.append(seconds)
        point.bounds.append(point.work.bound_seconds(machine))

    def _decode(self, point: Point, output_tokens: int) -> EngineRun:
        prompts = [prompt[: point.prompt_tokens] for prompt in self._held[: point.batch_size]]
        return self._contestant.complete(prompts, output_tokens)


def make_points(
    arguments: argparse.Namespace, settings: ModelSettings, formula: WorkFormula, max_context_tokens: int
) -> list[Point]:
    """Return a point for each batch size at each context length, and for each prompt length.

    Raises ValueError if a size does not fit the model or the engine. Default lengths that do not fit are left out.
    """
    points = []
    for context, batch in itertools.product(arguments.context, arguments.batch):
        if batch > settings.max_num_running:
            raise ValueError(f"--batch {batch} exceeds --max-num-running; add -- --max-num-running {batch}")
        # All of a prompt but one block comes from the cache. This many steps pass until the last sequence has its
        # first token.
        output = arguments.steps + 1 + batch * (settings.block_size + 1) // settings.max_batched_tokens
        prompt = min(context - output // 2, max_context_tokens - output)
        if prompt >= 1 and prompt + output <= max_context_tokens and context <= max_context_tokens:
            length = prompt + output // 2
            work = formula.decode(batch_size=batch, context_length=length)
            points.append(Point(batch, length, prompt, output, work))
        elif "context" not in arguments.usual:
            raise ValueError(
                f"--steps {arguments.steps} at --context {context} leaves no prompt tokens, or exceeds the model's "
                f"context of {max_context_tokens} tokens; choose other --context or --steps"
            )
    if not points:
        raise ValueError(
            f"--steps {arguments.steps} at --context {' '.join(map(str, arguments.context))} does not fit the model's "
            f"context of {max_context_tokens} tokens; choose other --context or --steps"
        )
    for prompt in arguments.prompt_tokens:
        if prompt < max_context_tokens:
            work = formula.prompt(num_tokens=prompt, tokens_per_step=settings.max_batched_tokens)
            points.append(Point(0, 0, prompt, 1, work))
        elif "prompt_tokens" not in arguments.usual:
            raise ValueError(f"--prompt-tokens {prompt} must be below the model's context, {max_context_tokens} tokens")
    return points


def measure(arguments: argparse.Namespace, settings: ModelSettings) -> dict[str, Any]:
    """Measure all points and return the results. Raises `ValueError` if a size or the checkpoint cannot be used.

    Results are also written to `arguments.out` after each repeat.
    """
    contestant = InProcess.open(settings)
    facts = contestant.facts
    kv_value_bytes = int(WEIGHT_BYTES[facts["kv_cache_dtype"]])
    formula = WorkFormula(contestant.manifest.config, facts["weights"], kv_value_bytes)
    points = make_points(arguments, settings, formula, contestant.manifest.config.max_context_length)
    sweep, roofline, machines = Sweep(contestant), Roofline(facts["weights"], facts["device"]), []
    show("warm-up")
    sweep.warm_up(points)
    for number in range(arguments.repeats):
        show(f"repeat {number + 1} of {arguments.repeats}")
        machines.append(roofline.probe())
        for point in points:
            sweep.measure(point, machines[-1])
        result = {
            "kind": "engine",
            "model": facts,
            "settings": {"repeats": len(machines), "steps": arguments.steps, "temperature": 0.0},
            "engine_settings": settings.model_dump(mode="json", exclude={"checkpoint", "cache_dir"}),
            "roofline": {
                "weights": facts["weights"],
                "gb_per_second": spread(machine.bytes_per_second / 1e9 for machine in machines),
                "gflops": spread(machine.flops_per_second / 1e9 for machine in machines),
            },
            "decode": [point.to_dict() for point in points if point.batch_size],
            "prompts": [point.to_dict() for point in points if not point.batch_size],
        }
        if arguments.out is not None and len(machines) < arguments.repeats:  # kept if the program is stopped
            save_result(result | {"interrupted": True}, arguments.out)
    return result


def run(arguments: argparse.Namespace, settings: ModelSettings) -> dict[str, Any]:
    """Measure a checkpoint, or a temporary checkpoint of random weights, print the tables and return the results."""
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as scratch:
        if arguments.shape is not None:
            dtype = "bfloat16" if settings.dtype == "bfloat16" else "float32"
            made = write_random_checkpoint(Path(scratch) / "model", arguments.shape, dtype=dtype)
            settings = settings.model_copy(update={"checkpoint": made})
        result = measure(arguments, settings)
    print(table(DECODE_COLUMNS, result["decode"]))
    print(table(PROMPT_COLUMNS, result["prompts"]))
    return result
