"""What `kvasir bench` is told. Torch-free: a typo is answered before torch is imported."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from loadtest.shape_names import SHAPE_SIZES
from service.settings import ModelSettings, SettingsError, read_settings

PROGRAM = "kvasir bench"


class _List(NamedTuple):
    """What is swept: in full, and with --quick."""

    text: str
    usual: list[int]
    quick: list[int]


class _Count(NamedTuple):
    """One number: in full, and with --quick."""

    text: str
    usual: int
    quick: int


_LISTS: Final = {
    "batch": _List("sequences that run at once", [1, 4, 16, 64], [1, 16]),
    "context": _List("tokens of each of them", [128, 512, 1024], [128]),
    "prompt_tokens": _List("tokens of a prompt that comes alone", [64, 256, 1024], [256]),
}
_COUNTS: Final = {
    "steps": _Count("steps of a batch that are timed at once", 32, 16),
    "repeats": _Count("rounds of the sweep", 5, 3),
}


class _Parser(argparse.ArgumentParser):
    """One line and exit code 2 for what cannot be used, as every command has."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog=PROGRAM,
        usage="kvasir bench [flags] [-- settings]",
        allow_abbrev=False,
        description="Measure the engine in this process, over batch size, context and prompt length.",
        epilog="What follows -- are settings as `kvasir serve` knows them, like: -- --threads 1 --dtype bfloat16",
    )
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", metavar="DIR", help="checkpoint directory")
    model.add_argument(
        "--shape",
        choices=sorted(SHAPE_SIZES),
        help="instead: random weights; S has 28, M 109, qwen3-0.6b 596 million parameters",
    )
    add("--out", type=Path, metavar="FILE", help="write JSON there, with every repeat's value")
    add("--quick", action="store_true", help="batch 1 and 16 at context 128, one prompt, 3 rounds, unless said")
    for name, form in _LISTS.items():
        told = " ".join(map(str, form.usual))
        add(_flag(name), type=_positive, nargs="+", metavar="N", help=f"{form.text} (default: {told})")
    for name, count in _COUNTS.items():
        add(_flag(name), type=_positive, metavar="N", help=f"{count.text} (default: {count.usual})")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, ModelSettings]:
    """The bench's own arguments, and behind `--` the engine's settings.

    Where a shape is named, `settings.checkpoint` is a place-holder: its model is made later. A list that was not given
    is in `arguments.usual`, by name: of it, what does not fit the model is left out.

    Raises:
        SystemExit: with code 2 and one line for what cannot be used, with 0 where `--help` was asked for.
    """
    own, engine_flags = split_at_dashes(argv)
    parser = _parser()
    arguments, unknown = parser.parse_known_args(own)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; see {PROGRAM} --help")
    forms = _LISTS | _COUNTS
    arguments.usual = {name for name in forms if getattr(arguments, name) is None}
    for name in arguments.usual:
        setattr(arguments, name, forms[name].quick if arguments.quick else forms[name].usual)
    if arguments.steps < 2:
        parser.error("--steps must be at least 2")
    try:
        checkpoint = arguments.checkpoint or f"shape-{arguments.shape}"
        engine = ["--checkpoint", checkpoint, *engine_flags]
        return arguments, read_settings(ModelSettings, engine, command="bench", summary="")
    except SettingsError as error:
        parser.error(str(error))


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before `--`, and what behind it: a bench's own arguments, and settings of the engine or service."""
    given = list(argv)
    split = given.index("--") if "--" in given else len(given)
    return given[:split], given[split + 1 :]


def refuse(message: str) -> NoReturn:
    """End the program as for arguments that cannot be used."""
    _parser().error(message)
