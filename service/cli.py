"""`kvasir`: one table of commands. A command is imported when it is called, so that `tokenize` costs no torch."""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("service.commands.serve", "serve a checkpoint over HTTP, in OpenAI's protocol"),
    "generate": ("service.commands.generate", "continue a text here and now, without a server"),
    "train": ("service.commands.train", "train a model and write its checkpoint"),
    "eval": ("service.commands.eval", "measure a model: held-out texts, minimal pairs, samples"),
    "bench": ("service.commands.bench", "measure the engine in this process"),
    "tokenize": ("service.commands.tokenize", "show how a text becomes token ids"),
    "export-tokenizer": ("service.commands.export_tokenizer", "write the tokenizer for other tools to count with"),
    "convert": ("service.commands.convert", "make a checkpoint of one kind from another"),
    "inspect": ("service.commands.inspect", "show what is in a checkpoint"),
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
        case [name, *rest] if name in COMMANDS:
            return _run(name, rest)
    print(f"kvasir: no command {arguments[0]!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def _run(name: str, argv: list[str]) -> int:
    # Before torch is loaded, here or in a worker that inherits it: OpenMP's threads are to sleep while they wait for
    # each other. By default they spin, and then one busy neighbour, such as our own API process, makes a step of two
    # threads on two cores a hundred times slower (measured: 540 ms instead of 6).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        module = importlib.import_module(COMMANDS[name][0])
        code: int = module.main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # `kvasir inspect | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
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
