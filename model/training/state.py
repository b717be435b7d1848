"""Files of a training run (last complete save, log with a JSON line per step, lock), and its progress lines."""

import collections
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.training.config import TrainConfig

STATE_FILE, LOG_FILE = "state.safetensors", "log.jsonl"
# Files of a run directory, besides the tokenizer's.
RUN_FILES = (STATE_FILE, "state.partial", LOG_FILE, "log.partial", "lock")
_LENGTHS = ("steps", "decay_steps", "chat_steps", "average_steps")
# Values that the saved steps do not depend on. The lengths may change until the learning rate decays, or the chat steps
# or the mean of the weights begin, by the saved or the new config.
_CHANGEABLE = (
    "checkpoint_minutes", "evaluate_every", "sample_prompts", "description", "repetition_steps", "repetition_interval",
    *_LENGTHS,
)  # fmt: skip
_LINE_SECONDS = 10.0  # between two progress lines
_SMOOTHING = 20  # steps over which the training loss of a progress line is smoothed
_WINDOW_SECONDS = 60.0  # window over which the speed is measured


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Saved state of a training run: steps done, seconds spent on them, tensors of model and optimizers by name."""

    step: int
    seconds: float
    tensors: Mapping[str, Tensor]


def save_state(directory: Path, state: RunState, config: TrainConfig, corpora: list[str]) -> None:
    """Replace the last save of a run. After a crash, the old or the new file is complete: it is synced, then renamed.

    corpora: SHA-256 of each corpus file, in the order of the sources.
    """
    partial = directory / "state.partial"
    facts = {"step": state.step, "seconds": state.seconds, "config": config_facts(config, corpora)}
    # Copies, since tied weights share memory, which safetensors rejects.
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in state.tensors.items()}
    save_file(tensors, partial, metadata={"run": json.dumps(facts)})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(directory / STATE_FILE)


def load_state(directory: Path, config: TrainConfig, corpora: list[str]) -> RunState | None:
    """Return the last complete save of a run, or None without a save.

    Raises:
        ValueError: the save is damaged, or its run differs from `config` or `corpora` in a value that the saved steps
            depend on. The numbers of steps and the chat sources may differ until the learning rate
            decays or the chat steps begin.
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
        raise ValueError(f"{path}: damaged save ({error}); delete it to start the run over") from error
    current = config_facts(config, corpora)
    saved.setdefault("average_steps", 0)  # a save made before this key
    plateau_end = min(facts["steps"] - max(facts[name] for name in _LENGTHS[1:]) for facts in (saved, current))
    changeable = (*_CHANGEABLE, "chat_sources") if step <= plateau_end else _CHANGEABLE
    if changed := [key for key in current if key not in changeable and saved.get(key) != current[key]]:
        raise ValueError(
            f"{path}: the run began with different values of {', '.join(changed)}; use another "
            "--run-directory, or undo the change"
        )
    if step > plateau_end and any(saved[key] != current[key] for key in _LENGTHS):
        raise ValueError(
            f"{path}: {' or '.join(_LENGTHS)} changed, but by the saved step {step} the learning rate "
            "decays, or the chat steps or the mean of the weights have begun; restore the saved values, or use another "
            "--run-directory"
        )
    return RunState(step=step, seconds=seconds, tensors=tensors)


def config_facts(config: TrainConfig, corpora: list[str]) -> dict[str, Any]:
    """Return the config as JSON values, with the SHA-256 of the corpora in use.

    `save_state` writes these values, and `load_state` compares them with those of the resumed run.
    """
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    hashed = list(zip(config.sources, corpora, strict=True))
    texts = [(s, corpus) for s, corpus in hashed if s.repeats or s.held_out or s.held_out_ids]
    values["model"] = config.model.to_dict()
    values["sources"] = [[s.name, s.path.name, s.repeats, s.held_out, s.held_out_ids] for s, _ in texts]
    values["corpora"] = [corpus for _, corpus in texts]
    values["chat_sources"] = [[s.name, s.chat_repeats, corpus] for s, corpus in hashed if s.chat_repeats]
    names = [path.name for path in config.start_from]
    values["start_from"] = names if len(names) > 1 else "".join(names) or None  # as in saves made before lists
    facts: dict[str, Any] = json.loads(json.dumps(values))
    return facts


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Context manager: hold an exclusive lock on a run directory, which is created if it is missing.

    Raises ValueError if another process holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{directory}: another run is using it as its run directory; use another --run-directory"
            ) from error
        yield


def truncate_log(path: Path, step: int) -> list[dict[str, float]]:
    """Remove the lines of step `step` and later from a log, since a resumed run repeats them. Return the rest."""
    earlier = [line for line in read_log(path) if line["step"] < step]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in earlier))
    partial.replace(path)
    return earlier


def read_log(path: Path) -> list[dict[str, float]]:
    """Return the lines of a run's log as dicts, without lines that a crash has damaged; [] if there is no log."""
    if not path.exists():
        return []
    read = []
    for line in path.read_text(errors="replace").split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            read.append(json.loads(line))
    return [line for line in read if isinstance(line, dict) and "step" in line]


def deterministic(seed: int) -> None:
    """Seed PyTorch, and make its results bitwise identical between runs on the same hardware and number of threads.

    Operations for which PyTorch has no deterministic algorithm only log a warning.
    """
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    # Else each new tensor is filled with NaN first, by a kernel of its own.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class Progress:
    """Recent speed of a training run, evaluations and saves included, and a progress line every 10 s."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line
        self._marks: collections.deque[tuple[int, float]] = collections.deque()
        self._loss: float | None = None
        self._printed_at = -_LINE_SECONDS

    def record(self, step: int) -> None:
        """Record that `step` steps of the run are done now."""
        now = time.monotonic()
        self._marks.append((step, now))
        # Keep at least two measurements, even if they are far apart.
        while len(self._marks) > 2 and now - self._marks[1][1] > _WINDOW_SECONDS:
            self._marks.popleft()

    @property
    def seconds_per_step(self) -> float | None:
        """Mean seconds per step over the last minute; None before two steps are recorded."""
        if len(self._marks) < 2:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return (ended - began) / (last - first)

    def report(self, config: TrainConfig, loss: float, held_out: Sequence[float], spent: float) -> None:
        """Print a progress line, unless the previous line is less than 10 s old and the run has steps left.

        loss: training loss of the recorded step. held_out: all held-out losses so far, of which the last is printed.
        spent: seconds of training so far.
        """
        self._loss = loss if self._loss is None else self._loss + (loss - self._loss) / _SMOOTHING
        step, seconds = self._marks[-1][0], self.seconds_per_step
        if step < config.steps and time.monotonic() - self._printed_at < _LINE_SECONDS:
            return
        self._printed_at = time.monotonic()
        parts = (
            "time left unknown" if seconds is None else f"{duration((config.steps - step) * seconds)} left",
            f"{duration(spent)} spent",
            f"loss {self._loss:.2f}" + (f" (held out {held_out[-1]:.2f})" if held_out else ""),
            *([] if seconds is None else [f"{config.tokens_per_step / seconds:,.0f} tokens/s"]),
            f"step {step:,}/{config.steps:,}",
        )
        self._print_line(", ".join(parts))


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss, or as m:ss below one hour."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
