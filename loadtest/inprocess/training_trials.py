"""Training trials of the default model's recipe: small runs that differ from a base run in one choice.

    python -m loadtest.inprocess.training_trials --out docs/results/trials.json

Needs the corpora of docs/training.md, which are read once for all trials. An interrupted run continues: trials in
the file are not repeated. The trials share the recipe's texts, tokenizer and order of learning. They are compared
by held-out bits per byte, at equal tokens and by the seconds they took.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from loadtest.measurement.provenance import provenance, quiet_or_warned
from model.system.limits import usable_cpus
from model.training.config import TrainConfig, load_train_config
from model.training.corpus import Corpus, read_corpus
from model.training.data.sources import CorpusError
from model.training.optimizer import Optimizers
from model.training.state import deterministic
from model.training.train import RunSettings, Trainer, can_compile, default_precision

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPE = ROOT / "model" / "training" / "configs" / "kvasir.toml"
OUT = ROOT / "docs" / "results" / "trials.json"

# Small enough for minutes on two cores, with the recipe's proportions.
_SMALL_MODEL = {"num_layers": 4, "hidden_size": 192, "num_heads": 3, "num_kv_heads": 1, "mlp_size": 512}
_SMALL_RUN: dict[str, Any] = {
    "batch_size": 4, "steps": 300, "warmup_steps": 30, "decay_steps": 90, "chat_steps": 0, "evaluate_every": 10_000,
}  # fmt: skip
# Changes of each trial to the run, and under "model" to the model. "muon" is in neither config; False is AdamW for all
# parameters.
TRIALS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "another seed": {"seed": 2},
    "a stream, no document mask": {"mask_documents": False},
    "AdamW alone": {"muon": False},
    "AdamW alone, half its rate": {"muon": False, "adam_lr": 3e-3},
    "AdamW alone, a quarter of its rate": {"muon": False, "adam_lr": 1.5e-3},
    "half the rates": {"matrix_lr": 5e-3, "adam_lr": 3e-3},
    "twice the rates": {"matrix_lr": 2e-2, "adam_lr": 1.2e-2},
    "half the batch, twice the steps": {"batch_size": 2, "steps": 600, "warmup_steps": 60, "decay_steps": 180},
    "twice the batch, half the steps": {"batch_size": 8, "steps": 150, "warmup_steps": 15, "decay_steps": 45},
    "no decay": {"decay_steps": 0},
    "a decay over the whole run": {"decay_steps": 270},
    "no QK-norm": {"model": {"qk_norm": False}},
    "multi-head attention": {"model": {"num_kv_heads": 3}},
    "one head of 192": {"model": {"num_heads": 1, "head_dim": 192}},
    "six heads of 32": {"model": {"num_heads": 6, "head_dim": 32}},
    "untied embeddings": {"model": {"tie_embeddings": False}},
    "GELU, not gated": {"model": {"mlp": "gelu", "mlp_size": 768}},
    "no weight decay": {"weight_decay": 0.0},
    "dropout 0.1": {"dropout": 0.1},
    "learned positions": {"model": {"position": "learned"}},
}


def trial_config(recipe: TrainConfig, changes: Mapping[str, Any]) -> TrainConfig:
    """Return the small run with a trial's changes."""
    of_model = {**recipe.model.to_dict(), **_SMALL_MODEL, **changes.get("model", {})}
    of_run = {key: value for key, value in changes.items() if key not in ("model", "muon")}
    model = type(recipe.model).from_dict(of_model)
    return dataclasses.replace(recipe, model=model, **{**_SMALL_RUN, **of_run})


def run_trial(corpus: Corpus, recipe: TrainConfig, changes: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Train one trial and return its figures, JSON-ready."""
    config = trial_config(recipe, changes)
    deterministic(config.seed)
    torch.compiler.reset()
    settings = RunSettings(
        run_directory=directory,
        checkpoint=directory / "none",
        device="cpu",
        precision=default_precision("cpu"),
        compile=can_compile("cpu"),
        stop_after=None,
    )
    trainer = Trainer(config, settings, dataclasses.replace(corpus, config=config))
    if not changes.get("muon", True):
        trainer.optimizers = Optimizers(trainer.model, config, muon=False)
    losses = [trainer.train_step() for _ in range(config.steps)]
    return {
        "parameters": config.model.num_parameters,
        "tokens": config.steps * config.tokens_per_step,
        "final_loss": sum(losses[-20:]) / 20,
        **trainer.held_out(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing trials. Return the exit code: 0; 1 for unusable corpora."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.inprocess.training_trials", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--config", type=Path, default=RECIPE, metavar="FILE", help="recipe (default: the default model's)"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/trials"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--out",
        type=Path,
        default=OUT,
        metavar="FILE",
        help="JSON file with the trials (default: docs/results/trials.json)",
    )
    parser.add_argument("--only", nargs="+", choices=TRIALS, default=list(TRIALS), metavar="TRIAL")
    arguments = parser.parse_args(given)
    found: dict[str, Any] = {"kind": "trials", "trials": {}}
    if arguments.out.is_file():
        found = json.loads(arguments.out.read_text())
    found |= provenance(parser.prog, given) | {"other_work_cores": quiet_or_warned(parser.prog)}
    torch.set_num_threads(usable_cpus())
    try:
        recipe = load_train_config(arguments.config)
        corpus = read_corpus(recipe, arguments.runs, lambda text: print(text, file=sys.stderr))
        for name in arguments.only:
            if name not in found["trials"]:
                found["trials"][name] = run_trial(corpus, recipe, TRIALS[name], arguments.runs)
                arguments.out.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{name}: {found['trials'][name]['held_out_loss']:.4f} nats a token", flush=True)
    except (CorpusError, ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
