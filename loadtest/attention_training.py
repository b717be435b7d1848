"""Every mechanism of `attention_rows`, trained by `kvasir train`, and what the finished runs say of themselves.

A run that was interrupted goes on where it stopped; one that is finished is read, not repeated.
"""

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.attention_rows import ROWS, Row
from model.manifest import Manifest, read_manifest
from model.training.state import read_log

BYTES_PER_VALUE = 4  # float32, as the engine keeps it on a CPU
# One thread: the machine is shared, and a model of this size gains little from a second.
FLAGS = ("--threads", "1", "--no-compile")
_TOKENIZER_FILE = "tokenizer.tiktoken"


class RunMissing(ValueError):
    """A run is not finished, or is not the recipe's. The message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Run:
    """One mechanism trained from one seed."""

    row: Row
    seed: int
    runs: Path

    @property
    def directory(self) -> Path:
        return self.runs / f"{self.row.name}-{self.seed}"

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    @property
    def is_finished(self) -> bool:
        """The card is written last."""
        return (self.checkpoint / "MODEL_CARD.md").is_file()

    def command(self) -> list[str]:
        """What a person would type."""
        paths = ["--run-directory", str(self.directory), "--out", str(self.checkpoint)]
        return ["kvasir", "train", "--config", str(self.row.recipe_file), "--seed", str(self.seed), *paths, *FLAGS]

    def train(self) -> None:
        """Train it, or what is left of it. Raises RunMissing when the command fails."""
        program = [sys.executable, "-c", "import sys; from service.cli import main; sys.exit(main())"]
        code = subprocess.run([*program, *self.command()[1:]], check=False).returncode
        if code:
            raise RunMissing(f"{' '.join(self.command())}: exit code {code}; the same command goes on from there")

    def result(self) -> dict[str, Any]:
        """What it came to, JSON-ready. Raises RunMissing."""
        manifest = self._manifest()
        training = manifest.training
        (nats,) = training["held_out_nats_per_token"].values()
        (bits,) = training["held_out_bits_per_byte"].values()
        curve = [
            [line["step"] + 1, round(line["held_out_loss"], 4)]
            for line in read_log(self.directory / "log.jsonl")
            if "held_out_loss" in line
        ]
        return {
            "seed": self.seed,
            "nats_per_token": nats,
            "bits_per_byte": bits,
            "train_seconds": training["seconds"],
            "precision": training["precision"],
            "hardware": training["hardware"],
            "commit": training["commit"][:12],
            "tokenizer": manifest.files[_TOKENIZER_FILE][1],
            "curve": curve,
        }

    def _manifest(self) -> Manifest:
        if not self.is_finished:
            raise RunMissing(f"{self.directory} is not finished: run {' '.join(self.command())}")
        manifest, recipe = read_manifest(self.checkpoint), self.row.recipe()
        made = (manifest.config, manifest.training["steps"], manifest.training["seed"])
        if made != (recipe.model, recipe.steps, self.seed):
            raise RunMissing(f"{self.directory} was trained by another recipe than {self.row.recipe_file}: delete it")
        return manifest


def train_all(runs: Path, seeds: Sequence[int]) -> None:
    """Train what is not finished, seed by seed. Raises RunMissing when a run fails."""
    for seed in seeds:
        for row in ROWS:
            if not (run := Run(row, seed, runs)).is_finished:
                print(f"== {row.title}, seed {seed}", flush=True)
                run.train()


def collect(runs: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """What all the runs came to, JSON-ready.

    Raises:
        RunMissing: a run is not finished, is another recipe's, or has another tokenizer than the first.
    """
    rows: dict[str, Any] = {}
    for row in ROWS:
        config = row.recipe().model
        rows[row.name] = {
            "title": row.title,
            "compared_with": row.compared_with,
            "changes": row.changes(),
            "parameters": config.num_parameters,
            "kv_bytes_per_token": config.kv_bytes_per_token(BYTES_PER_VALUE),
            "runs": [Run(row, seed, runs).result() for seed in seeds],
        }
    made = [run for row in rows.values() for run in row["runs"]]
    if len({run.pop("tokenizer") for run in made}) > 1:
        raise RunMissing(f"the runs in {runs} have different tokenizers, so that their losses can't be compared")
    recipe = ROWS[0].recipe()
    return {
        "settings": {
            "seeds": list(seeds),
            "steps": recipe.steps,
            "batch_size": recipe.batch_size,
            "sequence_length": recipe.sequence_length,
            "vocab_size": recipe.vocab_size,
            "kv_bytes_per_value": BYTES_PER_VALUE,
            "precision": sorted({run.pop("precision") for run in made}),
            "hardware": sorted({run.pop("hardware") for run in made}),
            "train_minutes": math.ceil(sum(run["train_seconds"] for run in made) / 60),
        },
        "rows": rows,
    }
