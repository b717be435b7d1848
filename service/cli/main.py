"""Command line `kvasir`: a table of commands, and the function that runs a command and reports its error."""

import gc
import importlib.metadata
import logging
import os
import pkgutil
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from model.checkpoint.read_ahead import read_ahead
from model.io.files import error_line, first_line
from service.config import client_settings, training_settings
from service.config import settings as config
from service.config.flags import CommandSettings
from service.config.torch_environment import set_torch_environment
from service.supervisor.worker_process import WorkerProcess

INTERRUPTED = 128 + signal.SIGINT  # the exit code that shells report for a process killed by SIGINT
EXTRA_MODULES = ("matplotlib",)  # optional dependencies (extras in pyproject.toml)
ENTRY_POINT_GROUP = "kvasir.commands"  # commands of other packages of the project (pyproject.toml)
logger = logging.getLogger("service.cli")
_HELP_HEAD = "Kvasir serves decoder-only language models.\n\nusage: kvasir COMMAND [flags]"
_HELP_END = "`kvasir COMMAND --help` explains a command; `kvasir --version` prints the version."


class Command(NamedTuple):
    """Command of `kvasir`: a line for the list of commands, a settings class, and the function to run."""

    line: str
    settings: type[CommandSettings] | None = None  # None: an entry point takes the unparsed arguments
    function: str = ""  # imported after the flags are parsed: importing torch takes seconds


COMMANDS = {
    "serve": Command(
        "serve a checkpoint over HTTP, with OpenAI's and Anthropic's APIs", config.ServeSettings, "serve:main"
    ),
    "batch": Command("answer a file of requests in OpenAI's batch format", client_settings.BatchSettings, "batch:main"),
    "generate": Command("complete a text in this process, without a server", config.GenerateSettings, "generate:main"),
    "chat": Command("chat with the model of a running server", client_settings.ChatSettings, "chat:main"),
    "train": Command("train a model and write its checkpoint", training_settings.TrainSettings, "train:main"),
    "eval": Command(
        "evaluate a model on held-out texts, minimal pairs, samples", training_settings.EvalSettings, "eval:main"
    ),
    "bench": Command("measure the engine in this process"),
    "loadtest": Command("find the limits of a running server with OpenAI's API"),
    "tokenize": Command("show how a text becomes token ids", config.TokenizeSettings, "inspect:tokenize"),
    "export-tokenizer": Command(
        "write the tokenizer as a Hugging Face directory", config.ExportTokenizerSettings, "inspect:export_tokenizer"
    ),
    "convert": Command("convert a checkpoint into another format", config.ConvertSettings, "convert:main"),
    "families": Command("list the supported model families", config.FamiliesSettings, "families:main"),
    "inspect": Command(
        "show a checkpoint, and how it would be served here", config.InspectSettings, "inspect_checkpoint:main"
    ),
    "inspect params": Command(
        "count the parameters of every matrix", config.InspectParamsSettings, "inspect:inspect_params"
    ),
    "inspect attention": Command(
        "show the attention weights of a prompt", config.InspectAttentionSettings, "inspect_attention:main"
    ),
}


def main(argv: Sequence[str] | None = None, *, worker: WorkerProcess | None = None) -> int:
    """Run one command and return its exit code: 0 success, 1 failure, 2 invalid arguments, 130 interrupted.

    worker: worker process that was started for `kvasir serve`; None: the command starts one.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = "\n".join(f"  {name:<{width}}  {command.line}" for name, command in COMMANDS.items())
        print(f"{_HELP_HEAD}\n\n{lines}\n\n{_HELP_END}")
        return 0
    if arguments[0] == "--version":
        print(f"kvasir {importlib.metadata.version('kvasir')}")
        return 0
    for num_words in (2, 1):
        if (name := " ".join(arguments[:num_words])) in COMMANDS:
            return _run(name, COMMANDS[name], arguments[num_words:], worker)
    print(f"kvasir: there is no command {arguments[0]!r}; use one of {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _run(name: str, command: Command, argv: list[str], worker: WorkerProcess | None) -> int:
    set_torch_environment()
    try:
        if command.settings is None:
            try:
                (entry_point,) = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
                function = entry_point.load()
            except (ValueError, ModuleNotFoundError) as error:
                raise config.SettingsError(
                    f"the command's package is not installed; run `make install` in a checkout of Kvasir ({error})"
                ) from error
            enable_garbage_collection()
            raise_on_interrupt()
            code = int(function(argv))
        else:
            summary = " ".join((command.settings.__doc__ or "").split())
            settings = config.read_settings(command.settings, argv, command=name, summary=summary)
            reading: list[threading.Thread] = []
            if isinstance(settings, config.ServeSettings):
                reading += [threading.Thread(target=read_ahead, args=(settings.checkpoint,), daemon=True)]
                reading[0].start()
            function = pkgutil.resolve_name(f"service.cli.{command.function}")
            enable_garbage_collection()
            raise_on_interrupt()
            for thread in reading:  # processes are forked while this process has one thread
                thread.join()
            code = int(function(settings) if worker is None else function(settings, worker))
        sys.stdout.flush()
    except BrokenPipeError:  # `kvasir inspect | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_MODULES:
            raise
        needed = error.name
        print(f"kvasir {name}: needs {needed}, which is not installed; run `pip install {needed}`", file=sys.stderr)
        return 1
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        logger.debug("kvasir %s failed with this exception", name, exc_info=True)
        print(f"kvasir {name}: {error_line(first_line(error))}", file=sys.stderr)
        return 2 if isinstance(error, config.SettingsError) else 1
    finally:
        if worker is not None:
            worker.close()
    return code


def enable_garbage_collection() -> None:
    """Let Python collect garbage, which `__main__` has switched off, except the objects of imported modules."""
    gc.freeze()
    gc.enable()


def raise_on_interrupt() -> None:
    """Let SIGINT raise KeyboardInterrupt, so that a command can clean up. An ignored SIGINT stays ignored."""
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def program() -> str:
    """Return the program name for printed commands: `kvasir`, or its path if PATH does not lead to this `kvasir`."""
    called = sys.argv[0]
    return called if Path(called).name == "kvasir" and shutil.which("kvasir") != called else "kvasir"
