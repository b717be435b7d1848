"""Command `kvasir train`: train a model on the user's own texts, or by a recipe, and write its checkpoint."""

import dataclasses
import errno
import functools
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

from model.io.files import first_line
from model.system.limits import usable_cpus
from model.training.autopilot import RECIPE_FILE, OwnTextRequest, train_own_text
from model.training.config import MAX_NAME_CHARACTERS, TrainConfig, load_train_config
from model.training.state import RUN_FILES
from model.training.train import RunSettings, can_compile, default_precision, train
from service.cli.main import INTERRUPTED, program
from service.config.settings import SettingsError
from service.config.training_settings import TrainSettings
from service.engine.engine import complete_batch
from service.worker.devices import find_device
from service.worker.engine_factory import free_bytes, keep_freed_memory

_PROMPT = "Once upon a time"  # used if a recipe has no sample prompts


class _Interruption:
    """Handler of SIGINT and SIGTERM: the first stops training after the current step, the second ends the process.

    Before the first training step, a signal raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._has_begun = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)

    def should_stop(self) -> bool:
        """Return True after SIGINT or SIGTERM. The training loop calls this method before each step.

        From the first call on, a signal no longer raises KeyboardInterrupt.
        """
        self._has_begun = True
        return self.is_requested

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True
        signal.signal(number, signal.SIG_DFL)
        if not self._has_begun:  # no progress to save
            raise KeyboardInterrupt
        print("\nstopping after this training step; interrupt again to stop now", file=sys.stderr, flush=True)


def main(settings: TrainSettings) -> int:
    """Run `kvasir train` until the last step, `--stop-after` or a signal. Return 130 if a signal stopped it, else 0."""
    began = time.monotonic() - _seconds_since_start()
    interruption = _Interruption()
    config = None if settings.config is None else _config(settings, settings.config)
    # The name of the output directory, without invalid characters.
    own_name = re.sub(r"[^\w.-]", "-", settings.out.resolve().name).lstrip(".")[:MAX_NAME_CHARACTERS] or "own-text"
    run = _run_settings(settings, own_name if config is None else config.name)
    _check_apart(run.checkpoint, run.run_directory)
    if config is not None:
        _check_memory(config, run.device)
    keep_freed_memory()
    report = functools.partial(print, flush=True)
    try:
        if config is None:
            request = OwnTextRequest(
                name=own_name,
                corpora=settings.corpus,
                minutes=settings.minutes,
                seed=1 if settings.seed is None else settings.seed,
                began=began,
            )
            done = train_own_text(request, run, report, interruption.should_stop, complete_batch)
        else:
            done = train(config, run, report, interruption.should_stop, complete_batch)
    except KeyboardInterrupt:
        print("\nkvasir train: stopped; run the same command again to continue", file=sys.stderr)
        return INTERRUPTED
    except (OSError, SafetensorError) as error:
        # The safetensors library reports a full disk, or a limit of the user, only in the text of an error.
        if not any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            raise OSError(str(error)) from error
        (run.run_directory / "state.partial").unlink(missing_ok=True)  # an incomplete save is useless and takes space
        raise OSError(
            f"{run.run_directory}: the disk is full, or a limit of this user is reached; the last save of the training "
            "run is intact; free some space, then run the same command to continue"
        ) from error
    except (RuntimeError, MemoryError) as error:
        raise RuntimeError(
            f"training failed: {first_line(error)}; if memory ran out, lower batch_size or the model's sizes"
        ) from error
    if not done:
        print(f"the training run is saved in {run.run_directory}; run the same command again to continue")
        return INTERRUPTED if interruption.is_requested else 0
    _print_next_commands(run, (config or load_train_config(run.run_directory / RECIPE_FILE)).sample_prompts)
    return 0


def _print_next_commands(run: RunSettings, prompts: Sequence[str]) -> None:
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


def _config(settings: TrainSettings, path: Path) -> TrainConfig:
    """Return the recipe with the values of --steps and --seed. All other numbers of steps are adapted to --steps."""
    config = load_train_config(path)
    if (steps := settings.steps) is not None:
        parts = ("decay_steps", "chat_steps", "repetition_steps", "average_steps")
        adapted = {name: getattr(config, name) * steps // config.steps for name in parts}
        warmup = min(config.warmup_steps, steps // 4)
        config = dataclasses.replace(config, steps=steps, warmup_steps=warmup, **adapted)
    return config if settings.seed is None else dataclasses.replace(config, seed=settings.seed)


def _check_apart(out: Path, run_directory: Path) -> None:
    """Raise SettingsError if --out overlaps the files that a training run saves in its run directory."""
    finished, run = out.resolve(), run_directory.resolve()
    is_run_file = any(run / name in (finished, *finished.parents) for name in RUN_FILES)
    if is_run_file or finished in (run, *run.parents):
        raise SettingsError(
            f"--out {out} overlaps {run_directory}, where this command saves the run; choose another --out"
        )


def _check_memory(config: TrainConfig, device: str) -> None:
    """Raise ValueError if less memory is free than training needs, since the kernel would later kill this process."""
    # Each parameter has a weight, a gradient and a momentum in float32. Each token of a step has logits and gradients.
    needed = 12 * config.model.num_parameters + 8 * config.tokens_per_step * config.vocab_size
    if needed > (free := free_bytes(device)):
        raise ValueError(
            f"training {config.model.num_parameters:,} parameters with {config.tokens_per_step:,} tokens per step "
            f"needs at least {needed // 2**20:,} MiB of memory, but {free // 2**20:,} MiB are free; "
            "lower batch_size or the sizes of the model in the recipe"
        )


def _run_settings(settings: TrainSettings, name: str) -> RunSettings:
    device = find_device(settings.device)
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


def _seconds_since_start() -> float:
    """Return the seconds since this process started, mostly spent importing torch; 0 if the system has no /proc."""
    try:
        started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
