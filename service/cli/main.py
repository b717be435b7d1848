"""Command line `kvasir`: a table of commands, and the code that runs one.

A command's module is imported after its flags are parsed: importing torch takes seconds, which a typo should not cost.
"""

import importlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic_settings import BaseSettings

from service.cli.interrupts import EXIT_CODE, raise_on_interrupt
from service.config.settings import (
    ConvertSettings,
    EvalSettings,
    ExportTokenizerSettings,
    GenerateSettings,
    InspectAttentionSettings,
    InspectParamsSettings,
    InspectSettings,
    ServeSettings,
    SettingsError,
    TokenizeSettings,
    TrainSettings,
    read_settings,
)
from service.config.torch_environment import LIBRARY_ENVIRONMENT
from service.supervisor.worker_process import WorkerProcess

# Optional dependencies (extras in pyproject.toml), which serving does not need.
EXTRA_MODULES = ("matplotlib",)
# Errors that mean an unusable checkpoint, by module.
_CHECKPOINT_ERRORS = {
    "model.checkpoint.manifest": "CheckpointError",
    "model.tokenizer.interface": "TokenizerError",
    "model.chat.template": "ChatTemplateError",
    "model.sampling.generation_config": "GenerationConfigError",
}


class Command(NamedTuple):
    """One command of the command line.

    module: module in `service.cli` whose `main` takes the settings and returns the exit code.
    line: description in the list of commands.
    settings: settings class, whose docstring heads the help page. None: an entry point takes the unparsed arguments.
    """

    module: str
    line: str
    settings: type[BaseSettings] | None


# Entry points of commands that other packages of the project implement (pyproject.toml).
ENTRY_POINT_GROUP = "kvasir.commands"
COMMANDS = {
    "serve": Command("serve", "serve a checkpoint over HTTP, in OpenAI's protocol", ServeSettings),
    "generate": Command("generate", "complete a text in this process, without a server", GenerateSettings),
    "train": Command("train", "train a model and write its checkpoint", TrainSettings),
    "eval": Command("eval", "evaluate a model on held-out texts, minimal pairs, samples", EvalSettings),
    "bench": Command(ENTRY_POINT_GROUP, "measure the engine in this process", None),
    "tokenize": Command("tokenize", "show how a text becomes token ids", TokenizeSettings),
    "export-tokenizer": Command(
        "export_tokenizer", "write the tokenizer as a Hugging Face directory", ExportTokenizerSettings
    ),
    "convert": Command("convert", "convert a checkpoint into another format", ConvertSettings),
    "inspect": Command("inspect", "show the contents of a checkpoint", InspectSettings),
}
# `kvasir inspect WORD`.
LOOKS = {
    "params": Command("inspect_params", "count the parameters of every matrix", InspectParamsSettings),
    "attention": Command("inspect_attention", "show the attention weights of a prompt", InspectAttentionSettings),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 success, 1 failure, 2 invalid arguments, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    match arguments:
        case [] | ["-h" | "--help", *_]:
            print(_help())
            return 0
        case ["--version", *_]:
            print(f"kvasir {importlib.metadata.version('kvasir')}")
            return 0
        case ["inspect", look, *rest] if not look.startswith("-"):
            return _run(f"inspect {look}", LOOKS[look], rest) if look in LOOKS else _no_look(look)
        case [name, *rest] if name in COMMANDS:
            return _run(name, COMMANDS[name], rest)
    print(f"kvasir: no command {arguments[0]!r}; use one of {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _no_look(word: str) -> int:
    looks = " and ".join(f"`kvasir inspect {look}`" for look in LOOKS)
    hint = f"did you mean --checkpoint {word}?" if Path(word).is_dir() else f"use {looks}"
    print(f"kvasir inspect: no subcommand {word!r}; {hint}", file=sys.stderr)
    return 2


def _run(name: str, command: Command, argv: list[str]) -> int:
    # Set before torch is loaded, in this process or in a worker, which inherits the environment.
    for variable, value in LIBRARY_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    worker: WorkerProcess | None = None
    try:
        if command.settings is None:
            code = _run_entry_point(name, argv)
        else:
            summary = " ".join((command.settings.__doc__ or "").split())
            given = read_settings(command.settings, argv, command=name, summary=summary)
            if isinstance(given, ServeSettings):
                # The worker imports at the same time as main: imports take most of a small model's start.
                with suppress(OSError):  # the supervisor tries again, and then reports the error
                    worker = WorkerProcess(given.checkpoint)
            module = importlib.import_module(f"service.cli.{command.module}")
            raise_on_interrupt()
            code = int(module.main(given) if worker is None else module.main(given, worker))
        sys.stdout.flush()
    except SettingsError as error:
        print(f"kvasir {name}: {error}", file=sys.stderr)
        return 2
    except _checkpoint_errors() as error:
        print(f"kvasir {name}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_MODULES:
            raise
        advice = f"needs {error.name}, which is not installed; run `pip install {error.name}`"
        print(f"kvasir {name}: {advice}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `kvasir inspect | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return EXIT_CODE
    finally:
        if worker is not None:
            worker.close()
    return code


def _checkpoint_errors() -> tuple[type[Exception], ...]:
    """Return the errors of an unusable checkpoint, imported only after an error, to keep the start fast."""
    return tuple(getattr(importlib.import_module(module), name) for module, name in _CHECKPOINT_ERRORS.items())


def _run_entry_point(name: str, argv: list[str]) -> int:
    """Run the command that another package registers. Raises `SettingsError` if that package is not installed."""
    try:
        (entry_point,) = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
        main_function = entry_point.load()
    except (ValueError, ModuleNotFoundError) as error:
        advice = "its package is not installed; run `make install` in a checkout of Kvasir"
        raise SettingsError(f"{advice} ({error})") from error
    raise_on_interrupt()
    return int(main_function(argv))


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.line}" for name, command in COMMANDS.items())
    return f"""Kvasir serves decoder-only language models.

usage: kvasir COMMAND [flags]

{lines}

`kvasir COMMAND --help` explains a command; `kvasir --version` prints the version."""


def program() -> str:
    """Return `kvasir` if the shell finds this program under that name, else the path this process was called by."""
    called = sys.argv[0]
    return called if Path(called).name == "kvasir" and shutil.which("kvasir") != called else "kvasir"
