"""Saving and resuming a run: safetensors and JSON, replaced atomically, never pickle.

A run directory holds `state/` (the last complete save), `log.jsonl` (a line per step) and the tokenizer.
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

# The files of a run directory, without the tokenizer.
RUN_FILES = ("state", "state.partial", "state.old", "log.jsonl", "log.partial", "lock")
_LENGTHS = ("steps", "decay_steps", "chat_steps")
_EXTENSIBLE = (*_LENGTHS, "checkpoint_minutes", "evaluate_every", "sample_prompts", "description")
_UNTIL_DECAY = ("chat_sources",)


class StateError(ValueError):
    """A run cannot be resumed. The message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run: steps done, seconds spent, and its tensors."""

    step: int
    seconds: float
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def save_state(directory: Path, state: RunState, config: TrainConfig, corpora: list[str]) -> None:
    """Write the new state next to the old one, sync it, then rename: after a crash one of the two is complete."""
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
    """Return the last complete save, or None if the run has not been saved.

    Raises:
        StateError: the save is damaged, or its run differs from `config` in what the saved steps depend on.
    """
    path = next((p for p in (directory / "state", directory / "state.old") if p.exists()), None)
    if path is None:
        return None
    try:
        facts = json.loads((path / "run.json").read_text())
        model, optimizer = load_file(path / "model.safetensors"), load_file(path / "optim.safetensors")
        step, seconds, saved = int(facts["step"]), float(facts["seconds"]), dict(facts["config"])
        # A save of an older version lacks newer fields: their defaults apply.
        saved = {field.name: field.default for field in dataclasses.fields(config)} | {"chat_sources": []} | saved
        saved["model"] = json.loads(json.dumps(ModelConfig.from_dict(saved["model"]).to_dict()))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StateError(f"{path}: damaged ({error}); delete it to start over") from error
    current = config_facts(config, corpora)
    lengths = [tuple(int(facts.get(key, 0)) for key in _LENGTHS) for facts in (saved, current)]
    plateau_end = min(steps - max(decay, chat) for steps, decay, chat in lengths)
    free = (*_EXTENSIBLE, *(_UNTIL_DECAY if step <= plateau_end else ()))
    if changed := [key for key in current if key not in free and saved.get(key) != current[key]]:
        raise StateError(
            f"{path}: the run began with different values of {', '.join(changed)}; use another "
            "--run-directory, or undo the change"
        )
    if lengths[0] != lengths[1] and step > plateau_end:
        raise StateError(
            f"{path}: the learning rate already decays at step {step}; restore the number of steps, or "
            "use another --run-directory"
        )
    return RunState(step=step, seconds=seconds, model=model, optimizer=optimizer)


def config_facts(config: TrainConfig, corpora: list[str]) -> dict[str, Any]:
    """Return the config, and the SHA-256 of each corpus, as JSON values."""
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
    """Hold an exclusive lock on a run directory.

    Raises:
        StateError: another process holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateError(f"{directory}: another run is using it; use another --run-directory") from error
        yield


class RunLog:
    """Writer of `log.jsonl`, one JSON object per step. Opening it drops the lines from `step` on, which are redone."""

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
    """Return all complete lines. Lines truncated by a crash, or zero-filled after a power cut, are skipped."""
    if not path.exists():
        return []
    read = []
    for line in path.read_text(errors="replace").split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            read.append(json.loads(line))
    return [line for line in read if isinstance(line, dict) and "step" in line]


def clone_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, so that later steps do not change what is saved."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def deterministic(seed: int) -> None:
    """Make PyTorch results bitwise identical between runs on the same hardware with the same number of threads."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
