"""Training of every mechanism of `attention_rows` by `kvasir train`, and the results of the finished runs.

An interrupted run continues where it stopped. A finished run is read, not repeated.
"""

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.inprocess.attention_mechanisms import ROWS, Row
from model.checkpoint.manifest import Manifest, read_manifest
from model.training.state import read_log

BYTES_PER_VALUE = 4  # float32, the dtype in which `attention_speed` serves
# One thread: the machine is shared, and a second thread gains little for a model of this size.
FLAGS = ("--threads", "1", "--no-compile")
_TOKENIZER_FILE = "tokenizer.tiktoken"


class RunMissing(ValueError):
    """A run is not finished, or has another recipe. The message names the run and the remedy."""


@dataclass(frozen=True, slots=True)
class Run:
    """One mechanism trained from one seed."""

    row: Row
    seed: int
    runs: Path

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return self.runs / f"{self.row.name}-{self.seed}"

    @property
    def checkpoint(self) -> Path:
        """Directory of the run's checkpoint."""
        return self.directory / "checkpoint"

    @property
    def is_finished(self) -> bool:
        """True if the run is finished: `kvasir train` writes the model card last."""
        return (self.checkpoint / "MODEL_CARD.md").is_file()

    def command(self) -> list[str]:
        """Return the command as typed in a shell."""
        paths = ["--run-directory", str(self.directory), "--out", str(self.checkpoint)]
        return ["kvasir", "train", "--config", str(self.row.recipe_file), "--seed", str(self.seed), *paths, *FLAGS]

    def train(self) -> None:
        """Train the run, or continue it. Raises RunMissing if the command fails."""
        program = [sys.executable, "-c", "import sys; from service.cli.main import main; sys.exit(main())"]
        code = subprocess.run([*program, *self.command()[1:]], check=False).returncode
        if code:
            raise RunMissing(f"{' '.join(self.command())}: exit code {code}; repeat the command to continue")

    def result(self) -> dict[str, Any]:
        """Return the run's results, JSON-ready. Raises RunMissing."""
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
            raise RunMissing(f"{self.directory} was trained with another recipe than {self.row.recipe_file}; delete it")
        return manifest


def train_all(runs: Path, seeds: Sequence[int]) -> None:
    """Train the unfinished runs, seed by seed. Raises RunMissing if a run fails."""
    for seed in seeds:
        for row in ROWS:
            if not (run := Run(row, seed, runs)).is_finished:
                print(f"== {row.title}, seed {seed}", flush=True)
                run.train()


def collect(runs: Path, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the results of all runs, JSON-ready.

    Raises:
        RunMissing: a run is not finished, has another recipe, or has another tokenizer than the first run.
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
        raise RunMissing(
            f"the runs in {runs} have different tokenizers, so their losses cannot be compared; delete them"
        )
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
