"""`kvasir train`: a recipe and its corpora become a checkpoint."""

import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch

from model.error_line import error_line
from model.training.config import TrainConfig, load_train_config
from model.training.state import RUN_FILES
from model.training.train import RunSettings, can_compile, default_precision, train
from service.batch_completion import complete_batch
from service.engine_builder import free_bytes, keep_freed_memory
from service.settings import SettingsError, TrainSettings, read_settings, usable_cpus

_SUMMARY = (
    "Train a model by a recipe and write its checkpoint, ready for `kvasir serve`. The run saves itself as it goes; "
    "the same command goes on where it was interrupted, with the losses an uninterrupted run has."
)
_INTERRUPTED = 130


class _Interruption:
    """The first SIGINT or SIGTERM asks for a stop after the step at hand; the second ends the process."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(number, signal.SIG_DFL)


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: 0 done, 1 failed, 2 not understood, 130 interrupted and saved."""
    try:
        settings = read_settings(TrainSettings, argv, command="train", summary=_SUMMARY)
    except SettingsError as error:
        print(f"kvasir train: {error}", file=sys.stderr)
        return 2
    interruption = _Interruption()
    try:
        config = load_train_config(settings.config)
        if settings.steps is not None:
            config = _with_steps(config, settings.steps)
        if settings.seed is not None:
            config = dataclasses.replace(config, seed=settings.seed)
        run = _run_settings(settings, config)
        _check_apart(run.checkpoint, run.run_directory)
        _check_memory(config, run.device)
        keep_freed_memory()
        done = train(config, run, _report, lambda: interruption.asked, complete_batch)
    except (ValueError, OSError) as error:
        print(f"kvasir train: {error_line(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    except (RuntimeError, MemoryError) as error:  # torch's, whose message has several lines; a MemoryError has none
        said = next(iter(str(error).splitlines()), "out of memory")
        print(f"kvasir train: {error_line(said)}; if it is memory, lower batch_size or the sizes", file=sys.stderr)
        return 1
    if not done:
        print(f"saved in {run.run_directory}; the same command goes on from here")
    return _INTERRUPTED if interruption.asked and not done else 0


def _with_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """Another length, with warm-up and decay in proportion."""
    return dataclasses.replace(
        config,
        steps=steps,
        warmup_steps=min(config.warmup_steps, steps // 4),
        decay_steps=config.decay_steps * steps // config.steps,
    )


def _check_apart(out: Path, run_directory: Path) -> None:
    """Raises SettingsError: the run would save itself into its own result, or its result into what it saves.

    A subdirectory of its own in the run directory is neither.
    """
    finished, run = out.resolve(), run_directory.resolve()
    if finished == run:
        raise SettingsError(f"--out {out} is where the run saves itself; choose another")
    if finished in run.parents:
        raise SettingsError(f"--out {out} holds {run_directory}, where the run saves itself; choose another")
    if any(run / name in (finished, *finished.parents) for name in RUN_FILES):
        raise SettingsError(f"--out {out} is among the files the run saves itself in; choose another")


def _check_memory(config: TrainConfig, device: str) -> None:
    """Raises ValueError if what training needs in any case is not there, rather than be killed half-way.

    A parameter has a weight, a gradient and a momentum in float32, a token of a batch its logits and their gradient.
    """
    needed = 12 * config.model.num_parameters + 8 * config.tokens_per_step * config.vocab_size
    if needed > (free := free_bytes(device)):
        raise ValueError(
            f"{config.model.num_parameters:,} parameters and {config.tokens_per_step:,} tokens a step need at least "
            f"{needed // 2**20:,} MiB, and {free // 2**20:,} are free: lower batch_size or the sizes of the model"
        )


def _run_settings(settings: TrainSettings, config: TrainConfig) -> RunSettings:
    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise ValueError("--device cuda: no CUDA device can be used here")
    device = "cuda" if has_cuda and settings.device != "cpu" else "cpu"
    torch.set_num_threads(usable_cpus() if settings.threads == "auto" else settings.threads)
    return RunSettings(
        run_directory=settings.run_directory or Path("runs") / config.name,
        checkpoint=settings.out,
        device=device,
        precision=default_precision(device) if settings.precision == "auto" else settings.precision,
        compile=settings.compile and can_compile(device),
        stop_after=settings.stop_after,
        attention=settings.attention,
    )


def _report(text: str) -> None:
    print(text, flush=True)
