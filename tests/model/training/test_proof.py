"""Reproducibility: an interrupted run has the recorded losses.

docs/results/tales.jsonl is the log of `kvasir train --config model/training/configs/tales.toml --steps 200 --precision
float32 --threads 1 --no-compile`.
"""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from model.checkpoint.manifest import read_manifest
from model.training.config import TrainConfig, load_train_config
from model.training.state import read_log
from model.training.train import RunSettings, train

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "docs" / "results" / "tales.jsonl"
STEPS = 200


def config() -> TrainConfig:
    """Return the recipe tales.toml as `kvasir train --steps 200` changes it."""
    recipe = load_train_config(ROOT / "model" / "training" / "configs" / "tales.toml")
    return dataclasses.replace(recipe, steps=STEPS, decay_steps=recipe.decay_steps * STEPS // recipe.steps)


def run(directory: Path, name: str, stop_after: int | None = None) -> bool:
    settings = RunSettings(
        run_directory=directory / name,
        checkpoint=directory / f"{name}-checkpoint",
        device="cpu",
        precision="float32",
        compile=False,
        stop_after=stop_after,
    )
    return train(config(), settings, lambda text: None)


@pytest.mark.slow
def test_an_interrupted_run_has_the_recorded_losses(tmp_path: Path) -> None:
    """tests/model/training/test_train.py compares the bits of interrupted and uninterrupted runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert not run(tmp_path, "interrupted", stop_after=27)
        assert run(tmp_path, "interrupted")
    finally:
        torch.set_num_threads(threads)
    losses = [line["loss"] for line in read_log(tmp_path / "interrupted" / "log.jsonl")]
    recorded = read_log(RECORD)
    assert [line["step"] for line in recorded] == list(range(STEPS))
    # Another CPU sums in another order, and differences in the last bit grow with each step.
    for line, loss in zip(recorded, losses, strict=True):
        assert loss == pytest.approx(line["loss"], abs=0.1)
    for start in range(0, STEPS, 40):
        means = [math.fsum(values[start : start + 40]) / 40 for values in (losses, [r["loss"] for r in recorded])]
        assert means[0] == pytest.approx(means[1], abs=0.02)
    assert losses[-1] < losses[0] - 3.0


def test_the_manifest_holds_the_facts_of_the_run(tmp_path: Path) -> None:
    short = dataclasses.replace(config(), steps=2, warmup_steps=1, decay_steps=1)
    settings = RunSettings(
        run_directory=tmp_path / "run",
        checkpoint=tmp_path / "checkpoint",
        device="cpu",
        precision="float32",
        compile=False,
        stop_after=None,
    )
    assert train(short, settings, lambda text: None)
    facts = read_manifest(tmp_path / "checkpoint").training
    assert facts["seed"] == short.seed
    assert facts["steps"] == 2
    assert facts["tokens"] == 2 * short.tokens_per_step
    assert facts["seconds"] > 0
    assert len(facts["commit"]) == 40 or facts["commit"] == "unknown"
    assert "CPUs" in facts["hardware"]
    assert facts["torch"] == torch.__version__
    assert facts["final_loss"] == pytest.approx(math.fsum(r["loss"] for r in read_log(tmp_path / "run/log.jsonl")) / 2)
    assert set(facts["held_out_bits_per_byte"]) == set(facts["held_out_accuracy"]) == {"grimm"}
    (source,) = facts["sources"]
    assert len(source["sha256"]) == 64
    assert source["held_out_documents"] > 0
