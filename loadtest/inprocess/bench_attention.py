"""Benchmark of every attention mechanism, trained and served: docs/results/attention.json.

    python -m loadtest.inprocess.bench_attention train --seeds 1 2    trains missing runs: half an hour per seed
    python -m loadtest.inprocess.bench_attention speed                measures training and serving speed: minutes

The same command continues an interrupted `train`. Each round of `speed` runs every mechanism for a moment, so that a
slow minute of the machine affects all. Ratios are of tokens per second of CPU time, without other processes' work.
"""

import itertools
import math
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from loadtest.inprocess.engine import InProcess
from loadtest.measurement.benchmark_program import MeasurementFailed, run_program, show
from loadtest.measurement.figures import ratio_spread, spread
from model.attention.backends import ATTENTION_BACKENDS
from model.attention.metadata import AttentionForm, AttentionMetadata
from model.checkpoint.manifest import read_manifest
from model.training.config import TrainConfig, load_train_config
from model.training.corpus import Corpus, read_corpus
from model.training.state import deterministic, read_log
from model.training.train import RunSettings, Trainer, default_precision
from service.config.settings import ModelSettings

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "model" / "training" / "configs" / "attention"
BASELINE = "multi-head"
EAGER = "eager"  # row with the baseline's model on the unfused attention backend
# One thread: the machine is shared, and a second thread gains little for a model of this size.
TRAIN_FLAGS = ("--threads", "1", "--no-compile")
LAST_FILE = Path("checkpoint", "MODEL_CARD.md")  # the last file of a run that `kvasir train` writes
TRAIN_STEPS = 8
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 64, 64
KERNEL_LENGTHS = (128, 512, 2048)
_KERNEL_SECONDS = 0.5
_KERNEL_HEADS, _KERNEL_HEAD_DIM = 4, 32


@dataclass(frozen=True, slots=True)
class Row:
    """Attention mechanism: name of its recipe, title on the page, and the mechanism that it is compared with."""

    name: str
    title: str
    compared_with: str = BASELINE

    def recipe(self) -> TrainConfig:
        """Read the TOML training recipe of the mechanism. Raises ValueError if the recipe is invalid."""
        return load_train_config(RECIPES / f"{self.name}.toml")

    def changes(self) -> dict[str, Any]:
        """Return the model settings, JSON-ready, in which this recipe differs from the recipe `compared_with`."""
        before = load_train_config(RECIPES / f"{self.compared_with}.toml").model.to_dict()
        return {key: value for key, value in self.recipe().model.to_dict().items() if value != before[key]}


ROWS = (
    Row("average", "simple average", "learned"),
    Row("single-head", "single-head"),
    Row("multi-head", "multi-head, rotary (the baseline)"),
    Row("grouped-query", "grouped-query, 2 of 4"),
    Row("multi-query", "multi-query"),
    Row("none", "no positions"),
    Row("learned", "learned positions"),
    Row("sinusoidal", "sinusoidal positions"),
    Row("sinusoidal-scaled", "sinusoidal, token embeddings x sqrt(width)", "sinusoidal"),
    Row("scaled-embeddings", "rotary, token embeddings x sqrt(width)"),
    Row("partial-rotary", "partial rotary, 8 of 32"),
    Row("relative-bias", "relative bias (T5)"),
    Row("alibi", "linear biases (ALiBi)"),
    Row("disentangled", "disentangled (DeBERTa)"),
    Row("sliding-window", "sliding window of 32, but in the last layer"),
    Row("qk-norm", "normalised queries and keys"),
)


def run_result(row: Row, seed: int, run: Path) -> dict[str, Any]:
    """Return the results of a training run. Raises MeasurementFailed if unfinished, or trained by another recipe."""
    if not (run / LAST_FILE).is_file():
        raise MeasurementFailed(f"training run {run} is not finished; run bench_attention train --seeds {seed}")
    manifest, recipe = read_manifest(run / "checkpoint"), row.recipe()
    training = manifest.training
    if (manifest.config, training["steps"], training["seed"]) != (recipe.model, recipe.steps, seed):
        raise MeasurementFailed(f"{run} was trained with another recipe than {row.name}.toml; delete this run")
    (nats,) = training["held_out_nats_per_token"].values()
    log = [line for line in read_log(run / "log.jsonl") if "held_out_loss" in line]
    return {
        "seed": seed,
        "nats_per_token": nats,
        "train_seconds": training["seconds"],
        "precision": training["precision"],
        "commit": training["commit"][:12],
        "tokenizer": manifest.files["tokenizer.tiktoken"][1],
        "curve": [[line["step"] + 1, round(line["held_out_loss"], 4)] for line in log],
    }


def train(runs: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Train every attention mechanism with every seed, except finished runs. Return all results, JSON-ready.

    Raises:
        MeasurementFailed: a training run failed, used another recipe, or used another tokenizer than the other runs.
    """
    done = {}
    for seed, row in itertools.product(seeds, ROWS):
        run = runs / f"{row.name}-{seed}"
        if not (run / LAST_FILE).is_file():
            show(f"training {row.name}, seed {seed}")
            recipe = ["--config", str(RECIPES / f"{row.name}.toml"), "--seed", str(seed)]
            paths = ["--run-directory", str(run), "--out", str(run / "checkpoint")]
            command = [sys.executable, "-m", "service.cli", "train", *recipe, *paths, *TRAIN_FLAGS]
            if code := subprocess.run(command, check=False).returncode:
                raise MeasurementFailed(f"exit code {code} of {' '.join(command)}; repeat the benchmark to continue")
        done[row.name, seed] = run_result(row, seed, run)
    if len({run["tokenizer"] for run in done.values()}) > 1:
        raise MeasurementFailed(f"the training runs in {runs} have different tokenizers; delete them and train again")
    config = ROWS[0].recipe()
    return {
        "settings": {
            "seeds": list(seeds),
            **{key: getattr(config, key) for key in ("steps", "batch_size", "sequence_length", "vocab_size")},
            "precision": sorted({run["precision"] for run in done.values()}),
            "train_minutes": math.ceil(sum(run["train_seconds"] for run in done.values()) / 60),
        },
        "rows": {
            row.name: {
                "title": row.title,
                "compared_with": row.compared_with,
                "changes": row.changes(),
                "parameters": row.recipe().model.num_parameters,
                "kv_bytes_per_token": row.recipe().model.kv_bytes_per_token(4),  # float32, as served by `speed`
                "runs": [done[row.name, seed] for seed in seeds],
            }
            for row in ROWS
        },
    }


def speed(runs: Path, seed: int, rounds: int, threads: int) -> dict[str, Any]:
    """Measure training and serving speed of each attention mechanism, and the fused backend's speedup over eager.

    Raises:
        MeasurementFailed: a training run of this seed is missing.
    """
    trained = {row.name: runs / f"{row.name}-{seed}" for row in ROWS}
    for row in ROWS:
        run_result(row, seed, trained[row.name])  # report a missing run before the long work
    torch.set_num_threads(threads)
    sides = {row.name: (row, "sdpa") for row in ROWS}
    baseline, _ = sides[BASELINE]
    sides[EAGER] = (baseline, "eager")
    corpus = read_corpus(baseline.recipe(), trained[BASELINE], show)  # all mechanisms share corpus and tokenizer
    with tempfile.TemporaryDirectory() as scratch:
        trainers = {name: _trainer(*side, corpus, Path(scratch) / name) for name, side in sides.items()}
        training = _in_rounds("training", trainers, rounds)
    torch.use_deterministic_algorithms(mode=False)
    servers = {name: _server(trained[row.name], attention, threads) for name, (row, attention) in sides.items()}
    serving = _in_rounds("serving", servers, rounds)
    return {
        "settings": {
            "rounds": rounds,
            "threads": threads,
            "train_steps": TRAIN_STEPS,
            "train_precision": default_precision("cpu"),
            "streams": STREAMS,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "serve_dtype": "float32",
        },
        "rows": {name: _speeds("trained", training, name) | _speeds("served", serving, name) for name in sides},
        "kernels": [measure_kernel(length, rounds) for length in KERNEL_LENGTHS],
    }


Rates = list[tuple[float, float]]  # of each round: tokens or calls per second, and per second of CPU time


def _in_rounds(label: str, works: Mapping[str, Callable[[], int]], rounds: int) -> dict[str, Rates]:
    """Run every function once per round, after a warm-up round. Return each function's rates, one per round.

    A function returns a number of tokens or calls. A rate is a pair: this number per second, and per CPU second.
    """
    rates: dict[str, Rates] = {name: [] for name in works}
    for number in range(rounds + 1):
        show(f"{label}, round {number} of {rounds}")
        for name, work in works.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            count = work()
            rate = count / (time.perf_counter() - began), count / (time.process_time() - cpu_began)
            rates[name] += [rate] if number else []
    return rates


def _speeds(label: str, rates: Mapping[str, Rates], name: str) -> dict[str, Any]:
    """Return a mechanism's tokens/s, and its tokens per CPU second relative to the baseline, as spreads over rounds."""
    own, baseline = ([by_cpu for _, by_cpu in rates[side]] for side in (name, BASELINE))
    return {
        f"{label}_tokens_per_second": spread(rate for rate, _ in rates[name]),
        f"{label}_ratio": ratio_spread(own, baseline),
    }


def _trainer(row: Row, attention: str, corpus: Corpus, scratch: Path) -> Callable[[], int]:
    """Return a function that trains an attention mechanism for a few steps and returns the number of tokens."""
    recipe = row.recipe()
    deterministic(recipe.seed)
    settings = RunSettings(
        run_directory=scratch,
        checkpoint=scratch / "checkpoint",
        device="cpu",
        precision=default_precision("cpu"),
        compile=False,
        stop_after=None,
        attention=attention,
    )
    trainer = Trainer(recipe, settings, corpus)

    def steps() -> int:
        for _ in range(TRAIN_STEPS):
            trainer.train_step()
        return TRAIN_STEPS * recipe.tokens_per_step

    return steps


def _server(run: Path, attention: str, threads: int) -> Callable[[], int]:
    """Return a function that completes a batch of prompts with a trained model and returns the number of tokens."""
    settings = {"dtype": "float32", "attention": attention, "threads": threads, "max_num_running": STREAMS}
    checkpoint = {"checkpoint": run / "checkpoint", "device": "cpu"}
    served = InProcess.open(ModelSettings.model_validate(checkpoint | settings))

    def wave() -> int:
        prompts = [served.random_prompt(PROMPT_TOKENS) for _ in range(STREAMS)]
        return served.complete(prompts, OUTPUT_TOKENS).num_completion_tokens

    return wave


def measure_kernel(length: int, rounds: int) -> dict[str, Any]:
    """Return CPU milliseconds per call of causal attention over one sequence, on the eager and the fused backend."""
    qkv = torch.randn(3, length, _KERNEL_HEADS, _KERNEL_HEAD_DIM).unbind()
    form = AttentionForm(layer=0, scale=_KERNEL_HEAD_DIM**-0.5, window=None, bias=None)
    metadata = AttentionMetadata.uncached((length,))

    @torch.inference_mode()
    def calls(attention: str) -> int:
        count, began = 0, time.process_time()
        while not count or time.process_time() - began < _KERNEL_SECONDS / rounds:
            ATTENTION_BACKENDS[attention].attend(*qkv, form=form, metadata=metadata, kv_cache=None)
            count += 1
        return count

    rates = _in_rounds(f"{length} tokens", {name: partial(calls, name) for name in ("eager", "sdpa")}, rounds)
    eager, fused = ([1e3 / by_cpu for _, by_cpu in rates[name]] for name in ("eager", "sdpa"))
    return {
        "length": length,
        "score_bytes": _KERNEL_HEADS * length**2 * 4,  # the fused kernel stores no scores
        "eager_ms": spread(eager),
        "fused_ms": spread(fused),
        "ratio": ratio_spread(eager, fused),
    }


def _measure(arguments: Namespace) -> dict[str, Any]:
    if arguments.phase == "train":
        return train(arguments.runs, arguments.seeds)
    return speed(arguments.runs, arguments.seeds[0], arguments.rounds, arguments.threads)


_OPTIONS = {
    "phase": (str, "train the mechanisms, or measure their speed", ("train", "speed")),
    "seeds": ([1], "training seeds; `speed` uses the first"),
    "rounds": (7, "repeats of each measurement of `speed`"),
    "threads": (1, "CPU threads of `speed`"),
    "runs": (Path("runs/attention"), "directory of the training runs"),
    "out": (ROOT / "docs" / "results" / "attention.json", "JSON output file"),
}
# Each phase replaces its field of the JSON file.
main = partial(run_program, "loadtest.inprocess.bench_attention", __doc__, _OPTIONS, _measure, part="phase")


if __name__ == "__main__":
    raise SystemExit(main())
