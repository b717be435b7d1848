"""Command `kvasir train`: train a checkpoint from the user's own texts, or from a recipe and its corpora."""

import dataclasses
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

from model.io.one_line_error import first_line
from model.system.limits import usable_cpus
from model.training.autopilot import RECIPE_FILE, OwnTextRequest, train_own_text
from model.training.config import MAX_NAME_CHARACTERS, TrainConfig, load_train_config
from model.training.state import RUN_FILES
from model.training.train import RunSettings, can_compile, default_precision, train
from service.cli.interrupts import EXIT_CODE
from service.cli.main import program
from service.config.settings import SettingsError, TrainSettings
from service.engine.offline import complete_batch
from service.worker.engine_factory import find_device, free_bytes, keep_freed_memory

_PROMPT = "Once upon a time"  # used if a recipe has no sample prompts


class _Interruption:
    """Handler of SIGINT and SIGTERM: the first signal stops after the current step, the second ends the process.

    Before the first step, the first signal already ends the process, because there is no progress to save.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._has_begun = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)

    def should_stop(self) -> bool:
        """Return True after a signal. The training loop calls this before each step."""
        self._has_begun = True
        return self.is_requested

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True
        signal.signal(number, signal.SIG_DFL)
        if not self._has_begun:
            raise KeyboardInterrupt
        print("\nstopping after this step; interrupt again to stop now", file=sys.stderr, flush=True)


def main(settings: TrainSettings) -> int:
    """Run the command. Exit codes: 0 success, 130 interrupted."""
    began = time.monotonic() - _seconds_since_start()
    interruption = _Interruption()
    config = None if settings.config is None else _config(settings, settings.config)
    run = _run_settings(settings, _name(settings.out) if config is None else config.name)
    _check_apart(run.checkpoint, run.run_directory)
    if config is not None:
        _check_memory(config, run.device)
    keep_freed_memory()
    try:
        if config is None:
            request = OwnTextRequest(
                name=_name(settings.out),
                corpora=settings.corpus,
                minutes=settings.minutes,
                seed=1 if settings.seed is None else settings.seed,
                began=began,
            )
            done = train_own_text(request, run, _report, interruption.should_stop, complete_batch)
        else:
            done = train(config, run, _report, interruption.should_stop, complete_batch)
    except KeyboardInterrupt:
        print("\nkvasir train: stopped; run the same command again to continue", file=sys.stderr)
        return EXIT_CODE
    except (OSError, SafetensorError) as error:
        # The safetensors library reports a full disk only in the text of an error.
        is_disk_full = "No space left on device" in str(error)
        raise OSError(_disk_full(run.run_directory) if is_disk_full else str(error)) from error
    except (RuntimeError, MemoryError) as error:
        raise RuntimeError(f"{first_line(error)}; if memory ran out, lower batch_size or the model's sizes") from error
    if not done:
        print(f"saved in {run.run_directory}; run the same command again to continue")
        return EXIT_CODE if interruption.is_requested else 0
    _print_next_commands(run, (config or load_train_config(run.run_directory / RECIPE_FILE)).sample_prompts)
    return 0


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
    """Return the recipe with the values that flags override. Its warm-up, decay and chat steps follow --steps."""
    config = load_train_config(path)
    if (steps := settings.steps) is not None:
        config = dataclasses.replace(
            config,
            steps=steps,
            warmup_steps=min(config.warmup_steps, steps // 4),
            decay_steps=config.decay_steps * steps // config.steps,
            chat_steps=config.chat_steps * steps // config.steps,
        )
    return config if settings.seed is None else dataclasses.replace(config, seed=settings.seed)


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


def _report(text: str) -> None:
    print(text, flush=True)


def _seconds_since_start() -> float:
    """Return the age of this process, mostly spent importing torch. Return 0 if the system has no /proc."""
    try:
        started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
