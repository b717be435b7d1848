"""Command line of `kvasir bench`. Torch-free, so that a typo is reported before torch is imported."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from loadtest.measurement.shape_names import SHAPE_SIZES
from service.config.settings import ModelSettings, SettingsError, read_settings

PROGRAM = "kvasir bench"


class _List(NamedTuple):
    """A list that is swept: its values, and those with --quick."""

    text: str
    usual: list[int]
    quick: list[int]


class _Count(NamedTuple):
    """A number: its value, and that with --quick."""

    text: str
    usual: int
    quick: int


_LISTS: Final = {
    "batch": _List("batch sizes, in sequences", [1, 4, 16, 64], [1, 16]),
    "context": _List("context lengths, in tokens", [128, 512, 1024], [128]),
    "prompt_tokens": _List("lengths of a prompt alone in the engine, in tokens", [64, 256, 1024], [256]),
}
_COUNTS: Final = {
    "steps": _Count("steps per timed run of a batch", 32, 16),
    "repeats": _Count("repeats of the sweep", 5, 3),
}


class _Parser(argparse.ArgumentParser):
    """Parser that reports an error in one line, with exit code 2, as every command does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog=PROGRAM,
        usage="kvasir bench [flags] [-- settings]",
        allow_abbrev=False,
        description="Measure the engine in this process, over batch size, context and prompt length.",
        epilog="Arguments after -- are settings of `kvasir serve`, for example: -- --threads 1 --dtype bfloat16",
    )
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", metavar="DIR", help="checkpoint directory")
    model.add_argument(
        "--shape",
        choices=sorted(SHAPE_SIZES),
        help="random weights of a shape instead; S has 28, M 109, qwen3-0.6b 596 million parameters",
    )
    add("--out", type=Path, metavar="FILE", help="JSON output file, with the value of every repeat")
    add("--quick", action="store_true", help="default to batch 1 and 16, context 128, one prompt, 16 steps, 3 repeats")
    for name, form in _LISTS.items():
        values = " ".join(map(str, form.usual))
        add(_flag(name), type=_positive, nargs="+", metavar="N", help=f"{form.text} (default: {values})")
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
    """Read the benchmark's own arguments, and the engine's settings after `--`.

    With a shape, `settings.checkpoint` is a placeholder until the model is written. `arguments.usual` holds the
    names of lists that were not given: their values that do not fit the model are left out.

    Raises:
        SystemExit: code 2 with one line for invalid arguments; code 0 for `--help`.
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
    """Split arguments at `--` into a benchmark's own arguments and settings of the engine or service."""
    given = list(argv)
    split = given.index("--") if "--" in given else len(given)
    return given[:split], given[split + 1 :]


def refuse(message: str) -> NoReturn:
    """Exit with a one-line error, as for invalid arguments."""
    _parser().error(message)
