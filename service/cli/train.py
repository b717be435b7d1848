"""Command `kvasir train`: train a checkpoint from the user's own texts, or from a recipe and its corpora."""

import dataclasses
import errno
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
from safetensors import SafetensorError

from model.io.one_line_error import error_line
from model.system.limits import usable_cpus
from model.training.autopilot import RECIPE_FILE, Wish, train_own_text
from model.training.config import MAX_NAME_CHARACTERS, TrainConfig, load_train_config
from model.training.state import RUN_FILES
from model.training.train import RunSettings, can_compile, default_precision, train
from service.cli.main import program
from service.config.settings import SettingsError, TrainSettings
from service.engine.offline import complete_batch
from service.worker.engine_factory import free_bytes, keep_freed_memory

_INTERRUPTED = 130
_MINUTES = 10.0
_PROMPT = "Once upon a time"  # used if a recipe has no sample prompts


class _Interruption:
    """Handler of SIGINT and SIGTERM: the first signal stops after the current step, the second ends the process.

    Before the first step, the first signal already ends the process, because there is no progress to save.
    """

    def __init__(self) -> None:
        self._asked = False
        self._steps = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def is_asked(self) -> bool:
        """Return True if the run should stop. The training loop calls this before each step."""
        self._steps = True
        return self._asked

    @property
    def came(self) -> bool:
        """True if a signal has arrived."""
        return self._asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(number, signal.SIG_DFL)
        if not self._steps:
            raise KeyboardInterrupt
        print("\nstopping after this step; interrupt again to stop now", file=sys.stderr, flush=True)


def main(settings: TrainSettings) -> int:
    """Run the command. Exit codes: 0 success, 1 failure, 2 invalid settings, 130 interrupted."""
    began = time.monotonic() - _seconds_since_start()
    interruption = _Interruption()
    run_directory = Path("runs")
    try:
        if settings.config is not None:
            config = _config(settings, settings.config)
            run = _run_settings(settings, config.name)
            run_directory = run.run_directory
            _check_apart(run.checkpoint, run_directory)
            _check_memory(config, run.device)
            keep_freed_memory()
            done = train(config, run, _report, interruption.is_asked, complete_batch)
            if done:
                _print_next_commands(run, config.sample_prompts)
        else:
            name = _name(settings.out)
            run = _run_settings(settings, name)
            run_directory = run.run_directory
            _check_apart(run.checkpoint, run_directory)
            keep_freed_memory()
            wish = _build_wish(settings, name, began)
            done = train_own_text(wish, run, _report, interruption.is_asked, complete_batch)
            if done:
                _print_next_commands(run, load_train_config(run.run_directory / RECIPE_FILE).sample_prompts)
    except KeyboardInterrupt:
        print("\nkvasir train: stopped; run the same command again to continue", file=sys.stderr)
        return _INTERRUPTED
    except (ValueError, OSError, SafetensorError) as error:
        said = _disk_full(run_directory) if _is_disk_full(error) else str(error)
        print(f"kvasir train: {error_line(said)}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    except (RuntimeError, MemoryError) as error:  # torch's messages have several lines; a MemoryError has no message
        said = next(iter(str(error).splitlines()), "out of memory")
        print(
            f"kvasir train: {error_line(said)}; if memory ran out, lower batch_size or the model's sizes",
            file=sys.stderr,
        )
        return 1
    if not done:
        print(f"saved in {run_directory}; run the same command again to continue")
    return _INTERRUPTED if interruption.came and not done else 0


def _build_wish(settings: TrainSettings, name: str, began: float) -> Wish:
    return Wish(
        name=name,
        corpora=settings.corpus,
        minutes=_MINUTES if settings.minutes is None else settings.minutes,
        seed=1 if settings.seed is None else settings.seed,
        began=began,
    )


def _print_next_commands(run: RunSettings, prompts: Sequence[str]) -> None:
    """Print commands that serve the finished model and send it a request."""
    kvasir, checkpoint = program(), shlex.quote(str(run.checkpoint))
    prompt = prompts[0] if prompts else _PROMPT
    body = shlex.quote(json.dumps({"prompt": prompt, "max_tokens": 100}, ensure_ascii=False))
    header = "-H 'Content-Type: application/json'"
    print(f"""
To serve the model, and to send it a request from another terminal:

  {kvasir} serve --checkpoint {checkpoint}
  curl -s http://127.0.0.1:8000/v1/completions {header} -d {body}

To generate text without a server:

  {kvasir} generate --checkpoint {checkpoint} --prompt {shlex.quote(prompt)}
""")


def _is_disk_full(error: Exception) -> bool:
    """Return True if the disk is full. The safetensors library reports this only in the text of its error."""
    return (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left on device" in str(error)


def _disk_full(run_directory: Path) -> str:
    (run_directory / "state.partial").unlink(missing_ok=True)  # an incomplete save is useless and takes space
    return (
        f"{run_directory}: the disk is full; the last save is intact; free some space, then run the same "
        "command to continue"
    )


def _name(out: Path) -> str:
    """Return the name of the run and its model: the output directory's name, with invalid characters replaced."""
    return re.sub(r"[^\w.-]", "-", out.resolve().name).lstrip(".")[:MAX_NAME_CHARACTERS] or "own-text"


def _config(settings: TrainSettings, path: Path) -> TrainConfig:
    """Return the recipe, with the values that flags override."""
    config = load_train_config(path)
    if settings.steps is not None:
        config = _with_steps(config, settings.steps)
    return config if settings.seed is None else dataclasses.replace(config, seed=settings.seed)


def _with_steps(config: TrainConfig, steps: int) -> TrainConfig:
    """Return the recipe with another number of steps, and with its warm-up, decay and chat steps adapted."""
    return dataclasses.replace(
        config,
        steps=steps,
        warmup_steps=min(config.warmup_steps, steps // 4),
        decay_steps=config.decay_steps * steps // config.steps,
        chat_steps=config.chat_steps * steps // config.steps,
    )


def _check_apart(out: Path, run_directory: Path) -> None:
    """Check that the output directory and the files of the run directory do not overlap.

    The output may be a subdirectory of the run directory, if the run saves no file there.

    Raises:
        SettingsError: the directories overlap.
    """
    finished, run = out.resolve(), run_directory.resolve()
    if finished == run:
        raise SettingsError(f"--out {out} is the run directory; choose another directory")
    if finished in run.parents:
        raise SettingsError(f"--out {out} contains the run directory {run_directory}; choose another directory")
    if any(run / name in (finished, *finished.parents) for name in RUN_FILES):
        raise SettingsError(f"--out {out} is used by the run for its saved state; choose another directory")


def _check_memory(config: TrainConfig, device: str) -> None:
    """Check that the minimum memory for training is free, so that the process is not killed during training.

    Each parameter needs a weight, a gradient and a momentum in float32. Each token of a step needs its logits and their
    gradient.

    Raises:
        ValueError: less memory is free.
    """
    needed = 12 * config.model.num_parameters + 8 * config.tokens_per_step * config.vocab_size
    if needed > (free := free_bytes(device)):
        raise ValueError(
            f"{config.model.num_parameters:,} parameters and {config.tokens_per_step:,} tokens a step need at least "
            f"{needed // 2**20:,} MiB, but {free // 2**20:,} MiB are free; lower batch_size or the sizes of the model"
        )


def _run_settings(settings: TrainSettings, name: str) -> RunSettings:
    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise SettingsError("--device cuda: no CUDA device is available; check the driver, or give --device cpu")
    device = "cuda" if has_cuda and settings.device != "cpu" else "cpu"
    torch.set_num_threads(usable_cpus() if settings.threads == "auto" else settings.threads)
    return RunSettings(
        run_directory=settings.run_directory or Path("runs") / name,
        checkpoint=settings.out,
        device=device,
        precision=default_precision(device) if settings.precision == "auto" else settings.precision,
        compile=settings.compile and can_compile(device),
        stop_after=settings.stop_after,
        attention=settings.attention,
    )


def _report(text: str) -> None:
    print(text, flush=True)


def _seconds_since_start() -> float:
    """Return the age of this process, mostly spent importing torch. Return 0 if the system has no /proc."""
    try:
        started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
