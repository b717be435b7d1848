"""Training and serving speed of each attention mechanism, and the speedup of the fused kernel. Imports torch.

All contestants take turns in rounds. A round trains each for a few steps of the real training loop, then serves
from each checkpoint through the engine. A ratio is taken within a round, so that a slow minute of the machine
affects both sides. Ratios compare tokens per second of CPU time, so that CPU taken by other processes does not
count.
"""

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from loadtest.client.workload import tales
from loadtest.inprocess.attention_mechanisms import BASELINE, ROWS, Row
from loadtest.inprocess.attention_training import Run
from loadtest.inprocess.bench_engine import Prompts
from loadtest.inprocess.closed_loop import run_closed
from loadtest.inprocess.engine import InProcess
from loadtest.measurement.spread import Spread
from model.attention.backends import ATTENTION_BACKENDS
from model.attention.layer_spec import AttentionForm
from model.attention.metadata import AttentionMetadata
from model.sampling.params import SamplingParams
from model.training.corpus import Corpus, read_corpus
from model.training.state import deterministic
from model.training.train import RunSettings, Trainer, default_precision
from service.config.settings import ModelSettings
from service.ipc.messages import Submit

EAGER = "eager"  # the baseline's weights with attention written out: same numbers, different speed
STEPS = 8
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 64, 64
KERNEL_LENGTHS = (128, 512, 2048)
_KERNEL_SECONDS = 0.5
_KERNEL_HEADS, _KERNEL_HEAD_DIM = 4, 32


@dataclass(frozen=True, slots=True)
class Timing:
    """Tokens, and the seconds they took: wall time, and CPU time of all threads of this process."""

    tokens: int
    seconds: float
    cpu_seconds: float

    @classmethod
    def of(cls, work: Callable[[], int]) -> Self:
        """Time a function that returns its number of tokens."""
        began, cpu_began = time.perf_counter(), time.process_time()
        tokens = work()
        return cls(tokens, time.perf_counter() - began, time.process_time() - cpu_began)


@dataclass(slots=True)
class Contestant:
    """A mechanism on an attention backend, with its timings of each round."""

    name: str
    row: Row
    attention: str
    trained: list[Timing] = field(default_factory=list)
    served: list[Timing] = field(default_factory=list)

    def to_dict(self, baseline: "Contestant") -> dict[str, Any]:
        """Return a JSON-ready dictionary, with ratios to the baseline of the same round."""
        return {
            "trained_tokens_per_second": _per_second(self.trained),
            "trained_ratio": _ratio(self.trained, baseline.trained),
            "served_tokens_per_second": _per_second(self.served),
            "served_ratio": _ratio(self.served, baseline.served),
        }


def _per_second(timings: Sequence[Timing]) -> dict[str, Any]:
    return Spread(tuple(round(timing.tokens / timing.seconds, 1) for timing in timings)).to_dict()


def _ratio(own: Sequence[Timing], baseline: Sequence[Timing]) -> dict[str, Any]:
    speeds = ([timing.tokens / timing.cpu_seconds for timing in timings] for timings in (own, baseline))
    return Spread(tuple(round(ratio, 4) for ratio in Spread.of_ratios(*speeds).values)).to_dict()


def contestants(rows: Sequence[Row] = ROWS) -> list[Contestant]:
    """Return each mechanism on the fused kernels, and the baseline with attention written out."""
    made = [Contestant(row.name, row, "sdpa") for row in rows]
    return [*made, *(Contestant(EAGER, row, "eager") for row in rows if row.name == BASELINE)]


def measure(runs: Path, *, seed: int, rounds: int, threads: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure the speeds of all contestants, JSON-ready.

    Raises:
        RunMissing: a checkpoint is missing.
        ValueError: there are no rounds.
    """
    if rounds < 1:
        raise ValueError("rounds must be at least 1")
    made = contestants()
    for contestant in made:
        Run(contestant.row, seed, runs).result()  # report a missing run before the long work
    torch.set_num_threads(threads)
    measure_training(made, rounds, Run(made[0].row, seed, runs).directory, report)
    measure_serving(made, rounds, lambda row: Run(row, seed, runs).checkpoint, threads=threads, report=report)
    baseline = next(contestant for contestant in made if contestant.name == BASELINE)
    return {
        "settings": {
            "rounds": rounds,
            "threads": threads,
            "train_steps": STEPS,
            "train_precision": default_precision("cpu"),
            "streams": STREAMS,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "serve_dtype": "float32",
        },
        "rows": {contestant.name: contestant.to_dict(baseline) for contestant in made},
        "kernels": measure_kernels(rounds, KERNEL_LENGTHS),
    }


def measure_training(
    made: Iterable[Contestant], rounds: int, tokenizer_from: Path, report: Callable[[str], None]
) -> None:
    """Add `rounds` figures to each contestant: tokens/s over a few steps of the training loop.

    tokenizer_from: a run directory with the tokenizer to reuse.
    """
    with tempfile.TemporaryDirectory() as scratch:
        corpus: Corpus | None = None
        trainers: list[tuple[Contestant, Trainer]] = []
        for contestant in made:
            config = contestant.row.recipe()
            corpus = read_corpus(config, tokenizer_from, report) if corpus is None else corpus
            deterministic(config.seed)
            settings = RunSettings(
                run_directory=Path(scratch) / contestant.name,
                checkpoint=Path(scratch) / contestant.name / "checkpoint",
                device="cpu",
                precision=default_precision("cpu"),
                compile=False,
                stop_after=None,
                attention=contestant.attention,
            )
            trainers.append((contestant, Trainer(config, settings, corpus)))
        for number in range(-1, rounds):  # round -1 is a warm-up
            report(f"training, round {number + 1} of {rounds}")
            for contestant, trainer in trainers:
                timing = Timing.of(functools.partial(_train, trainer, STEPS if number >= 0 else 2))
                if number >= 0:
                    contestant.trained.append(timing)
    torch.use_deterministic_algorithms(mode=False)


def _train(trainer: Trainer, steps: int) -> int:
    for _ in range(steps):
        trainer.train_step()
    return steps * trainer.config.tokens_per_step


def measure_serving(
    made: Iterable[Contestant],
    rounds: int,
    checkpoint_of: Callable[[Row], Path],
    *,
    threads: int,
    report: Callable[[str], None],
) -> None:
    """Add `rounds` figures to each contestant: completion tokens/s of one wave through the engine."""
    opened = [(contestant, _open(contestant, checkpoint_of(contestant.row), threads)) for contestant in made]
    prompts = Prompts(opened[0][1].token_ids(tales()))
    uids = (f"attention-{number}" for number in itertools.count())
    for number in range(-1, rounds):
        report(f"serving, round {number + 1} of {rounds}")
        for contestant, served in opened:
            wave = [_submit(next(uids), prompts.next(PROMPT_TOKENS)) for _ in range(STREAMS)]
            timing = Timing.of(functools.partial(_serve, served, wave))
            if number >= 0:
                contestant.served.append(timing)


def _open(contestant: Contestant, checkpoint: Path, threads: int) -> InProcess:
    return InProcess.open(
        ModelSettings(
            checkpoint=checkpoint,
            device="cpu",
            dtype="float32",
            attention="eager" if contestant.attention == "eager" else "sdpa",
            threads=threads,
            max_num_running=STREAMS,
        )
    )


def _serve(served: InProcess, wave: Sequence[Submit]) -> int:
    return run_closed(served.engine, wave, num_streams=STREAMS).num_completion_tokens


def _submit(uid: str, prompt: tuple[int, ...]) -> Submit:
    return Submit(
        uid=uid,
        attempt=0,
        prompt_token_ids=prompt,
        prior_token_ids=(),
        params=SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True),
        arrival_seconds=time.monotonic(),
        deadline_seconds=None,
    )


def measure_kernels(rounds: int, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Measure causal attention over one sequence, written out and fused, at several lengths: CPU milliseconds per
    call.

    score_bytes: size of the stored scores, heads x length² x 4 bytes. The fused kernel stores no scores.
    """
    points = []
    for length in lengths:
        q_THD, k_TKD, v_TKD = torch.randn(3, length, _KERNEL_HEADS, _KERNEL_HEAD_DIM).unbind()
        calls = {name: _Call(name, (q_THD, k_TKD, v_TKD)) for name in ("eager", "sdpa")}
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(-1, rounds):
            for name, call in calls.items():
                took = call.seconds(_KERNEL_SECONDS / rounds)
                if number >= 0:
                    seconds[name].append(took)
        points.append(
            {
                "length": length,
                "score_bytes": _KERNEL_HEADS * length**2 * 4,
                "eager_ms": Spread(tuple(round(1e3 * value, 4) for value in seconds["eager"])).to_dict(),
                "fused_ms": Spread(tuple(round(1e3 * value, 4) for value in seconds["sdpa"])).to_dict(),
                "ratio": Spread.of_ratios(seconds["eager"], seconds["sdpa"]).to_dict(),
            }
        )
    return points


class _Call:
    """One backend's attention over one whole sequence."""

    def __init__(self, attention: str, qkv: tuple[torch.Tensor, ...]) -> None:
        self._backend = ATTENTION_BACKENDS[attention]
        self._qkv = qkv
        self._metadata = AttentionMetadata.uncached((len(qkv[0]),))
        self._form = AttentionForm(layer=0, scale=_KERNEL_HEAD_DIM**-0.5, window=None, bias=None)

    @torch.inference_mode()
    def seconds(self, at_least: float) -> float:
        """Return the mean CPU seconds per call, over calls that take `at_least` seconds together."""
        calls, began = 0, time.process_time()
        while (elapsed := time.process_time() - began) < at_least or not calls:
            self._backend.attend(*self._qkv, form=self._form, metadata=self._metadata, kv_cache=None)
            calls += 1
        return elapsed / calls
