"""Command `kvasir bench`: read the arguments, then load torch and measure the engine in this process."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from loadtest.measurement.benchmark_program import (
    EPILOG,
    CommandParser,
    add_options,
    read_arguments,
    run_benchmark,
)
from loadtest.measurement.model_shapes import SHAPE_SIZES, shape_config
from service.config.settings import ModelSettings, SettingsError, read_settings

# Option: description, default, default with --quick. A list is swept.
_OPTIONS: Final[dict[str, tuple[str, list[int] | int, list[int] | int]]] = {
    "batch": ("batch sizes, in sequences", [1, 4, 16, 64], [1, 16]),
    "context": ("context lengths, in tokens", [128, 512, 1024], [128]),
    "prompt_tokens": ("lengths of prompts that run alone, in tokens", [64, 256, 1024], [256]),
    "steps": ("decode steps per timed run of a batch", 32, 16),
    "repeats": ("repeats of every measurement", 5, 3),
}


def _parser(*, is_quick: bool) -> CommandParser:
    parser = CommandParser(
        prog="kvasir bench",
        usage="kvasir bench [flags] [-- settings]",
        description="Measure the engine in this process, without a service, by batch size, context and prompt length.",
        epilog=EPILOG,
    )
    model = parser.add_mutually_exclusive_group()
    text = "checkpoint directory (default: checkpoints/kvasir-20m in the working directory, else beside the package)"
    model.add_argument("--checkpoint", metavar="DIR", help=text)
    sizes = ", ".join(f"{name} {shape_config(name).num_parameters / 1e6:,.0f}" for name in SHAPE_SIZES)
    text = f"measure random weights instead; millions of parameters: {sizes}"
    model.add_argument("--shape", choices=SHAPE_SIZES, help=text)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON output file, with the value of every repeat")
    text = "change the defaults to batch 1 and 16, context 128, one prompt length, 16 steps, 3 repeats"
    parser.add_argument("--quick", action="store_true", help=text)
    add_options(parser, {name: (quick if is_quick else usual, text) for name, (text, usual, quick) in _OPTIONS.items()})
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvasir bench`: measure, print tables, write JSON to `--out`. Return the exit code: 0; 2: invalid arguments.

    `arguments.usual` holds the options without a given value: default lengths that do not fit the model are left out.
    """
    given = sys.argv[1:] if argv is None else argv
    parser = _parser(is_quick="--quick" in given)
    arguments = read_arguments(parser, given)
    arguments.usual = {name for name in _OPTIONS if getattr(arguments, name) is parser.get_default(name)}
    for name in _OPTIONS:
        value = getattr(arguments, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            parser.error(f"--{name.replace('_', '-')}: each number must be at least 1")
    if arguments.steps < 2:
        parser.error("--steps must be at least 2")
    # For a shape, the checkpoint is a placeholder until the model is written.
    checkpoint = arguments.checkpoint if arguments.shape is None else f"shape-{arguments.shape}"
    flags = [*([] if checkpoint is None else ["--checkpoint", checkpoint]), *arguments.serve]
    try:
        settings = read_settings(ModelSettings, flags, command="bench", summary="")
    except SettingsError as error:
        parser.error(str(error))
    from loadtest.inprocess import bench_engine  # imports torch, which takes seconds

    return run_benchmark(parser, arguments, lambda: bench_engine.run(arguments, settings), prints_json=False)


if __name__ == "__main__":
    raise SystemExit(main())
