"""`kvasir`: one table of commands.

A command is imported when its flags are understood: torch takes seconds, and a typo should not.
"""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic_settings import BaseSettings

from service.command_settings import (
    ConvertSettings,
    EvalSettings,
    ExportTokenizerSettings,
    InspectAttentionSettings,
    InspectParamsSettings,
    InspectSettings,
    TokenizeSettings,
    TrainSettings,
)
from service.early_worker import EARLY_WORKER
from service.interrupts import EXIT_CODE, raise_on_interrupt
from service.settings import GenerateSettings, ServeSettings, SettingsError, read_settings

# What torch's libraries read from the environment, unless it says otherwise.
LIBRARY_ENVIRONMENT = {
    # OpenMP's threads, on which PyTorch's own operators run (not our kernels), are to sleep while they wait for each
    # other. By default they spin, and then one busy neighbour, such as our own API process, makes a step of two
    # threads on two cores a hundred times slower (measured: 540 ms instead of 6). But not at once: what follows within
    # a step follows in microseconds, and so long a spin is 1.8 times the tokens on two quiet cores, and 0.4 to 0.7
    # beside a process that never rests (docs/performance-log.md).
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "3000",
    # oneDNN, and PyTorch's bridge to it, keep kernels of 1,024 shapes each, and every number of rows is another one:
    # 300 of them took 715 MB (five matrices of a model of 9.3 million parameters, float32), and so they take 77.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}

# Packages of the extras in pyproject.toml, which serving does not need.
EXTRA_MODULES = ("matplotlib",)


class Command(NamedTuple):
    """What one word does.

    module: its `main` takes the settings and returns the exit code.
    line: what the list of commands says.
    settings: their docstring heads the help page. None: `main` takes the arguments as they are.
    """

    module: str
    line: str
    settings: type[BaseSettings] | None


_IN = "service.commands."
COMMANDS = {
    "serve": Command(_IN + "serve", "serve a checkpoint over HTTP, in OpenAI's protocol", ServeSettings),
    "generate": Command(_IN + "generate", "continue a text here and now, without a server", GenerateSettings),
    "train": Command(_IN + "train", "train a model and write its checkpoint", TrainSettings),
    "eval": Command(_IN + "eval", "measure a model: held-out texts, minimal pairs, samples", EvalSettings),
    "bench": Command(_IN + "bench", "measure the engine in this process", None),
    "tokenize": Command(_IN + "tokenize", "show how a text becomes token ids", TokenizeSettings),
    "export-tokenizer": Command(
        _IN + "export_tokenizer", "write the tokenizer for other tools to count with", ExportTokenizerSettings
    ),
    "convert": Command(_IN + "convert", "make a checkpoint of one kind from another", ConvertSettings),
    "inspect": Command(_IN + "inspect", "show what is in a checkpoint", InspectSettings),
}
# `kvasir inspect WORD`.
LOOKS = {
    "params": Command(_IN + "inspect_params", "count every matrix", InspectParamsSettings),
    "attention": Command(_IN + "inspect_attention", "where a prompt's tokens look", InspectAttentionSettings),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 failed, 2 not understood."""
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
    print(f"kvasir: no command {arguments[0]!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _no_look(word: str) -> int:
    looks = " and ".join(f"`kvasir inspect {look}`" for look in LOOKS)
    hint = f"did you mean --checkpoint {word}?" if Path(word).is_dir() else f"there are {looks}"
    print(f"kvasir inspect: nothing called {word!r}; {hint}", file=sys.stderr)
    return 2


def _run(name: str, command: Command, argv: list[str]) -> int:
    # Before torch is loaded, here or in a worker that inherits them.
    for variable, value in LIBRARY_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        given: object = argv
        if command.settings is not None:
            summary = " ".join((command.settings.__doc__ or "").split())
            given = read_settings(command.settings, argv, command=name, summary=summary)
        if isinstance(given, ServeSettings):
            EARLY_WORKER.begin(given.checkpoint)
        module = importlib.import_module(command.module)
        raise_on_interrupt()
        code: int = module.main(given)
        sys.stdout.flush()
    except SettingsError as error:
        print(f"kvasir {name}: {error}", file=sys.stderr)
        return 2
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
        EARLY_WORKER.end()
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.line}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "Kvasir serves decoder-only language models.",
            "",
            "usage: kvasir COMMAND [flags]",
            "",
            *lines,
            "",
            "`kvasir COMMAND --help` explains a command; `kvasir --version` prints the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
