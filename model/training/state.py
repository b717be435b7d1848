"""Saving and resuming a run: one safetensors file replaced atomically, and a log in JSON lines.

A run directory holds `state.safetensors` (the last complete save), `log.jsonl` (a line per step) and the tokenizer.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.training.config import TrainConfig

STATE_FILE, LOG_FILE = "state.safetensors", "log.jsonl"
# Files of a run directory, without the tokenizer
RUN_FILES = (STATE_FILE, "state.partial", LOG_FILE, "log.partial", "lock")
_LENGTHS = ("steps", "decay_steps", "chat_steps")
_CHANGEABLE = ("checkpoint_minutes", "evaluate_every", "sample_prompts", "description", *_LENGTHS)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Steps done, seconds spent on the steps, and tensors of model and optimizers by name."""

    step: int
    seconds: float
    tensors: Mapping[str, Tensor]


def save_state(directory: Path, state: RunState, config: TrainConfig, corpora: list[str]) -> None:
    """Replace the last save. The new file is synced before the rename: after a crash one of the two is complete."""
    partial = directory / "state.partial"
    facts = {"step": state.step, "seconds": state.seconds, "config": config_facts(config, corpora)}
    # Copies, since tied weights share memory, which safetensors rejects.
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in state.tensors.items()}
    save_file(tensors, partial, metadata={"run": json.dumps(facts)})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(directory / STATE_FILE)


def load_state(directory: Path, config: TrainConfig, corpora: list[str]) -> RunState | None:
    """Return the last complete save, or None if the run has not been saved.

    Raises:
        ValueError: the save is damaged, or its run differs from `config` in what the saved steps depend on.
    """
    path = directory / STATE_FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["run"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        step, seconds, saved = int(facts["step"]), float(facts["seconds"]), dict(facts["config"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"{path}: damaged ({error}); delete it to start over") from error
    current = config_facts(config, corpora)
    plateau_end = min(facts["steps"] - max(facts["decay_steps"], facts["chat_steps"]) for facts in (saved, current))
    changeable = (*_CHANGEABLE, "chat_sources") if step <= plateau_end else _CHANGEABLE
    if changed := [key for key in current if key not in changeable and saved.get(key) != current[key]]:
        raise ValueError(
            f"{path}: the run began with different values of {', '.join(changed)}; use another "
            "--run-directory, or undo the change"
        )
    if step > plateau_end and any(saved[key] != current[key] for key in _LENGTHS):
        raise ValueError(
            f"{path}: the learning rate already decays at step {step}; restore the number of steps, or "
            "use another --run-directory"
        )
    return RunState(step=step, seconds=seconds, tensors=tensors)


def config_facts(config: TrainConfig, corpora: list[str]) -> dict[str, Any]:
    """Return the config, and the SHA-256 of each corpus, as JSON values."""
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    hashed = list(zip(config.sources, corpora, strict=True))
    texts = [(s, corpus) for s, corpus in hashed if s.repeats or s.held_out or s.held_out_ids]
    values["model"] = config.model.to_dict()
    values["sources"] = [[s.name, s.path.name, s.repeats, s.held_out, s.held_out_ids] for s, _ in texts]
    values["corpora"] = [corpus for _, corpus in texts]
    values["chat_sources"] = [[s.name, s.chat_repeats, corpus] for s, corpus in hashed if s.chat_repeats]
    facts: dict[str, Any] = json.loads(json.dumps(values))
    return facts


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on a run directory.

    Raises:
        ValueError: another process holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{directory}: another run is using it; use another --run-directory") from error
        yield


def truncate_log(path: Path, step: int) -> list[dict[str, float]]:
    """Drop the lines of `log.jsonl` from `step` on, since these steps are redone. Returns the remaining lines."""
    earlier = [line for line in read_log(path) if line["step"] < step]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in earlier))
    partial.replace(path)
    return earlier


def read_log(path: Path) -> list[dict[str, float]]:
    """Return all complete lines. Lines truncated by a crash, or zero-filled after a power cut, are skipped."""
    if not path.exists():
        return []
    read = []
    for line in path.read_text(errors="replace").split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            read.append(json.loads(line))
    return [line for line in read if isinstance(line, dict) and "step" in line]


def deterministic(seed: int) -> None:
    """Make PyTorch results bitwise identical between runs on the same hardware with the same number of threads."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
