"""Command line `kvasir`: a table of commands, and the code that runs one.

A command's module is imported after its flags are parsed: importing torch takes seconds, which a typo should not cost.
"""

import importlib
import importlib.metadata
import logging
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic_settings import BaseSettings

from model.io.files import error_line, first_line
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
logger = logging.getLogger("service.cli")


class Command(NamedTuple):
    """One command of the command line, run by `main` of its module, which returns the exit code.

    line: description in the list of commands.
    settings: settings class, whose docstring heads the help page. None: an entry point takes the unparsed arguments.
    """

    line: str
    settings: type[BaseSettings] | None


# Entry points of commands that other packages of the project implement (pyproject.toml).
ENTRY_POINT_GROUP = "kvasir.commands"
COMMANDS = {
    "serve": Command("serve a checkpoint over HTTP, in OpenAI's protocol", ServeSettings),
    "generate": Command("complete a text in this process, without a server", GenerateSettings),
    "train": Command("train a model and write its checkpoint", TrainSettings),
    "eval": Command("evaluate a model on held-out texts, minimal pairs, samples", EvalSettings),
    "bench": Command("measure the engine in this process", None),
    "tokenize": Command("show how a text becomes token ids", TokenizeSettings),
    "export-tokenizer": Command("write the tokenizer as a Hugging Face directory", ExportTokenizerSettings),
    "convert": Command("convert a checkpoint into another format", ConvertSettings),
    "inspect": Command("show the contents of a checkpoint", InspectSettings),
    "inspect params": Command("count the parameters of every matrix", InspectParamsSettings),
    "inspect attention": Command("show the attention weights of a prompt", InspectAttentionSettings),
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
    for num_words in (2, 1):
        if (name := " ".join(arguments[:num_words])) in COMMANDS:
            return _run(name, COMMANDS[name].settings, arguments[num_words:])
    print(f"kvasir: no command {arguments[0]!r}; use one of {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _run(name: str, kind: type[BaseSettings] | None, argv: list[str]) -> int:
    # Set before torch is loaded, in this process or in a worker, which inherits the environment.
    for variable, value in LIBRARY_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    worker: WorkerProcess | None = None
    try:
        if kind is None:
            code = _run_entry_point(name, argv)
        else:
            settings = read_settings(kind, argv, command=name, summary=" ".join((kind.__doc__ or "").split()))
            if isinstance(settings, ServeSettings):
                # The worker imports at the same time as main: imports take most of a small model's start.
                with suppress(OSError):  # the supervisor tries again, and then reports the error
                    worker = WorkerProcess(settings.checkpoint)
            module = importlib.import_module(f"service.cli.{re.sub('[ -]', '_', name)}")
            raise_on_interrupt()
            code = int(module.main(settings) if worker is None else module.main(settings, worker))
        sys.stdout.flush()
    except BrokenPipeError:  # `kvasir inspect | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return EXIT_CODE
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_MODULES:
            raise
        print(
            f"kvasir {name}: needs {error.name}, which is not installed; run `pip install {error.name}`",
            file=sys.stderr,
        )
        return 1
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        logger.debug("the command failed", exc_info=True)
        print(f"kvasir {name}: {error_line(first_line(error))}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    finally:
        if worker is not None:
            worker.close()
    return code


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
