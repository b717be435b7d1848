"""Saving and resuming a run: safetensors and JSON, swapped in whole, never pickle.

A run directory holds `state/` (the last complete save), `log.jsonl` (a line a step) and the tokenizer.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import ModelConfig
from model.training.config import TrainConfig

# What a run keeps in its directory, beside the tokenizer.
RUN_FILES = ("state", "state.partial", "state.old", "log.jsonl", "log.partial", "lock")
_LENGTHS = ("steps", "decay_steps", "chat_steps")
_EXTENSIBLE = (*_LENGTHS, "checkpoint_minutes", "evaluate_every", "sample_prompts", "description")
_UNTIL_DECAY = ("chat_sources",)


class StateError(ValueError):
    """A run cannot be resumed. The message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run stands: steps done, seconds spent, and its tensors."""

    step: int
    seconds: float
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def save_state(directory: Path, state: RunState, config: TrainConfig, corpora: list[str]) -> None:
    """Write `state/` beside the old one, make it durable, then swap: a crash leaves one of the two whole."""
    partial, final, old = (directory / name for name in ("state.partial", "state", "state.old"))
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file({name: t.detach().cpu().contiguous() for name, t in state.model.items()}, partial / "model.safetensors")
    save_file(
        {name: t.detach().cpu().contiguous() for name, t in state.optimizer.items()}, partial / "optim.safetensors"
    )
    facts = {"step": state.step, "seconds": state.seconds, "config": config_facts(config, corpora)}
    (partial / "run.json").write_text(json.dumps(facts))
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def load_state(directory: Path, config: TrainConfig, corpora: list[str]) -> RunState | None:
    """The last complete save, or None where there is none.

    Raises:
        StateError: the save is damaged, or belongs to a run that differs before the step it stands at.
    """
    path = next((p for p in (directory / "state", directory / "state.old") if p.exists()), None)
    if path is None:
        return None
    try:
        facts = json.loads((path / "run.json").read_text())
        model, optimizer = load_file(path / "model.safetensors"), load_file(path / "optim.safetensors")
        step, seconds, saved = int(facts["step"]), float(facts["seconds"]), dict(facts["config"])
        # Choices that came after the save take the defaults they had in it.
        saved = {field.name: field.default for field in dataclasses.fields(config)} | {"chat_sources": []} | saved
        saved["model"] = json.loads(json.dumps(ModelConfig.from_dict(saved["model"]).to_dict()))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StateError(f"{path}: damaged ({error}); delete it to begin anew") from error
    current = config_facts(config, corpora)
    lengths = [tuple(int(facts.get(key, 0)) for key in _LENGTHS) for facts in (saved, current)]
    plateau_end = min(steps - max(decay, chat) for steps, decay, chat in lengths)
    free = (*_EXTENSIBLE, *(_UNTIL_DECAY if step <= plateau_end else ()))
    if changed := [key for key in current if key not in free and saved.get(key) != current[key]]:
        raise StateError(
            f"{path}: the run was begun with another {', '.join(changed)}; use another --run-directory or undo that"
        )
    if lengths[0] != lengths[1] and step > plateau_end:
        raise StateError(f"{path}: at step {step} the learning rate already decays; steps can't change any more")
    return RunState(step=step, seconds=seconds, model=model, optimizer=optimizer)


def config_facts(config: TrainConfig, corpora: list[str]) -> dict[str, Any]:
    """The config, and the SHA-256 of each corpus, as JSON-ready values."""
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    values["model"] = config.model.to_dict()
    hashed = list(zip(config.sources, corpora, strict=True))
    texts = [(s, corpus) for s, corpus in hashed if s.repeats or s.held_out or s.held_out_ids]
    values["sources"] = [[s.name, s.path.name, s.repeats, s.held_out, list(s.held_out_ids)] for s, _ in texts]
    values["corpora"] = [corpus for _, corpus in texts]
    values["chat_sources"] = [
        [s.name, s.chat, s.chat_repeats, s.chat_draws, corpus] for s, corpus in hashed if s.chat_repeats
    ]
    values["sample_prompts"] = list(config.sample_prompts)
    facts: dict[str, Any] = json.loads(json.dumps(values))
    return facts


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep a second run out of the directory for as long as this one is in it.

    Raises:
        StateError: another process is in it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateError(f"{directory}: another run is using it; use another --run-directory") from error
        yield


class RunLog:
    """`log.jsonl`: one JSON object a step. Opening it at a step drops the lines of steps that will be done again."""

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_log(path) if line["step"] < step]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        partial.replace(path)
        self._file = path.open("a", buffering=1)

    def write(self, **values: float) -> None:
        """Append one line."""
        self._file.write(json.dumps(values) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_log(path: Path) -> list[dict[str, float]]:
    """All complete lines; a line that a crash cut off, or a power cut filled with zeros, is passed over."""
    if not path.exists():
        return []
    read = []
    for line in path.read_text(errors="replace").split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            read.append(json.loads(line))
    return [line for line in read if isinstance(line, dict) and "step" in line]


def clone_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, so that a save is of one moment."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def deterministic(seed: int) -> None:
    """Ask PyTorch for the same bits every time on the same hardware and thread count."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
