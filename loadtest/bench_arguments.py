"""What `kvasir bench` is told. Torch-free: a typo is answered before torch is imported."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from service.settings import ModelSettings, SettingsError, read_settings

PROGRAM = "kvasir bench"


class _Parser(argparse.ArgumentParser):
    """One line and exit code 2 for what cannot be used, as every command has."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog=PROGRAM,
        usage="kvasir bench [flags] [-- settings]",
        allow_abbrev=False,
        description="Measure the engine in this process, over batch size and prompt length.",
        epilog="What follows -- are settings as `kvasir serve` knows them, like: -- --threads 1 --dtype bfloat16",
    )
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="checkpoint directory (needed)")
    add("--out", type=Path, metavar="FILE", help="write JSON there, with every repeat's value")
    add(
        "--batch",
        type=int,
        nargs="+",
        default=[1, 4, 16, 64],
        metavar="N",
        help="sequences that run at once (default: 1 4 16 64)",
    )
    add(
        "--prompt-tokens",
        type=int,
        nargs="+",
        default=[32, 256],
        metavar="N",
        help="tokens of a prompt (default: 32 256)",
    )
    add("--output-tokens", type=int, default=64, metavar="N", help="tokens of a completion (default: %(default)s)")
    add("--repeats", type=int, default=5, metavar="N", help="rounds of the sweep (default: %(default)s)")
    return parser


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, ModelSettings]:
    """The bench's own arguments, and behind `--` the engine's settings.

    Raises:
        SystemExit: with code 2 and one line for what cannot be used, with 0 where `--help` was asked for.
    """
    given = list(argv)
    split = given.index("--") if "--" in given else len(given)
    parser = _parser()
    arguments, unknown = parser.parse_known_args(given[:split])
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; see {PROGRAM} --help")
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    try:
        engine = ["--checkpoint", arguments.checkpoint, *given[split + 1 :]]
        return arguments, read_settings(ModelSettings, engine, command="bench", summary="")
    except SettingsError as error:
        parser.error(str(error))


def refuse(message: str) -> NoReturn:
    """End the program as for arguments that cannot be used."""
    _parser().error(message)
