"""Common parts of all benchmark programs: options, provenance of the results, CPU use of other processes, JSON output.

Provenance is the commit, machine, versions, date and command of a run.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil

Options = Mapping[str, tuple[Any, ...]]
EPILOG = "Arguments after -- are settings of `kvasir serve`, for example: -- --threads 1 --dtype bfloat16"
_PACKAGES = ("torch", "litserve", "uvicorn", "numpy", "locust")
QUIET_CORES = 0.2
_ROOT = Path(__file__).resolve().parents[2]


class MeasurementFailed(RuntimeError):
    """Failure of the engine, service or other program under measurement. The message is the reason."""


class CommandParser(argparse.ArgumentParser):
    """Parser of a `kvasir` command: help as wide as that of all commands, errors in one line, exit code 2."""

    def __init__(self, **settings: Any) -> None:
        form = partial(argparse.HelpFormatter, max_help_position=30, width=100)
        super().__init__(allow_abbrev=False, formatter_class=form, **settings)

    def error(self, message: str) -> NoReturn:
        """Exit with 2 after one line on standard error."""
        hint = f"; see {self.prog} --help" if message.startswith("unrecognized") else ""
        self.exit(2, f"{self.prog}: {message}{hint}\n")


def add_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup, options: Options) -> None:
    """Add options to a parser. `options`: name -> (default, description) or (default, description, choices).

    A list as default: the option takes several values. None: an optional number. False: a flag without a value. A type
    instead of a default: a required option of this type, or with choices a positional argument.
    """
    for name, (default, text, *choices) in options.items():
        option, form = "--" + name.replace("_", "-"), {"choices": choices[0]} if choices else {}
        if default is False:
            parser.add_argument(option, action="store_true", help=text)
        elif isinstance(default, type):
            form |= {} if choices else {"required": True}
            parser.add_argument(name if choices else option, type=default, help=text, **form)
        else:
            form |= {"nargs": "+"} if isinstance(default, list) else {}
            first = default[0] if isinstance(default, list) else default
            text += "" if default is None else " (default: %(default)s)"
            parser.add_argument(
                option, type=float if first is None else type(first), default=default, help=text, **form
            )


def described(default: Any, text: str) -> Any:
    """Return a dataclass field with a default and a description, for an option of `options_of`."""
    return field(default=default, metadata={"help": text})


def options_of(settings: Any) -> dict[str, tuple[Any, ...]]:
    """Return an option for `add_options` for each field of a dataclass that was declared by `described`."""
    return {each.name: (each.default, each.metadata["help"]) for each in fields(settings) if each.metadata}


def read_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. Adds `serve`, the arguments after `--`, and `given`, all arguments, to the result."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    arguments = parser.parse_args(given[:split])
    arguments.given, arguments.serve = given, given[split + 1 :]
    return arguments


def run_program(
    module: str,
    doc: str | None,
    options: Options,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    argv: Sequence[str] | None = None,
    **settings: Any,
) -> int:
    """Parse the command line of the benchmark `python -m MODULE`, call `run_benchmark`, and return its exit code.

    doc: docstring of the module, whose first paragraph describes the benchmark in the help.
    options: options besides `--out`, as for `add_options`. settings: arguments of `run_benchmark`.
    """
    description = (doc or "").partition("\n\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description, epilog=EPILOG)
    add_options(parser, options)
    if "out" not in options:
        parser.add_argument("--out", type=Path, metavar="FILE", help="JSON output file (default: standard output)")
    arguments = read_arguments(parser, argv)
    return run_benchmark(parser, arguments, lambda: measure(arguments), **settings)


def run_benchmark(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    measure: Callable[[], dict[str, Any]],
    *,
    prints_json: bool = True,
    report: Callable[[Path], Sequence[Path]] | None = None,
) -> int:
    """Call `measure`, and write its figures with their provenance as JSON to the file `--out` or to standard output.

    prints_json: print the JSON if `--out` is missing; False: write nothing then.
    report: function that writes the report of the file `--out` beside it, and returns the paths to print.

    Returns the exit code: 0; 1 after `MeasurementFailed`, or for figures with a true field `interrupted`. A
    `ValueError` exits with 2, as invalid arguments do.
    """
    facts = provenance(parser.prog, arguments.given) | {"other_work_cores": measure_other_work(parser.prog)}
    began = time.perf_counter()
    try:
        figures = measure()
    except MeasurementFailed as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))
    result = facts | {"took_seconds": round(time.perf_counter() - began, 1)} | figures
    if prints_json or arguments.out is not None:
        write_result(result, arguments.out)
    if report is not None and arguments.out is not None:
        print(*report(arguments.out), sep="\n")
    return int(figures.get("interrupted", False))


def show(label: str) -> None:
    """Print the name of the measurement that begins now to standard error."""
    print(f"measuring: {label}", file=sys.stderr, flush=True)


def provenance(program: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the command, date, Git commit, machine and package versions of this benchmark run, JSON-ready."""
    named = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    packages = (package for name in _PACKAGES for package in list(importlib.metadata.distributions(name=name))[:1])
    return {
        "command": shlex.join([*program.split(), *arguments]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "machine": {
            "processor": named[1] if named else platform.processor() or "unknown",
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": platform.system() + " " + platform.machine(),
        },
        "versions": {"python": platform.python_version()} | {package.name: package.version for package in packages},
    }


def _commit() -> str:
    """Return the Git commit of the checkout, marked if files outside docs/ have changes; 'unknown' without Git."""
    try:
        head, changed = (
            subprocess.check_output(["git", *arguments], cwd=_ROOT, text=True, stderr=subprocess.DEVNULL).strip()
            for arguments in (
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head} with local changes" if changed else head


def new_run(directory: Path, name: str) -> Path:
    """Return the path of the results of a run that ends or begins now, in a directory of its own."""
    return directory / f"{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}-{name}" / "results.json"


def write_result(result: dict[str, Any], out: Path | None) -> None:
    """Write a benchmark result as JSON to the file `out` and print its path; without `out`, print the JSON."""
    if out is None:
        print(json.dumps(result, indent=1))
        return
    save_result(result, out)
    print(f"wrote {out}")


def save_result(result: dict[str, Any], out: Path) -> None:
    """Write a benchmark result as JSON to the file `out`, whose directory is created if it is missing."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


class ForeignWork:
    """Meter of CPU use by other processes: CPU time of all cores minus that of this process and its children."""

    def __init__(self) -> None:
        self._began = self._now()

    def cores(self) -> float:
        """Return the mean number of cores kept busy since the creation, by all but this process and its children."""
        seconds, busy, own = (now - began for now, began in zip(self._now(), self._began, strict=True))
        return max(0.0, (busy - own) / seconds)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Return clock time, CPU seconds of all cores, and CPU seconds of this process and all its children."""
        counts = [os.times()[:4]]
        for process in psutil.Process().children(recursive=True):
            try:
                counts.append(process.cpu_times()[:4])
            except psutil.NoSuchProcess:
                continue
        return time.monotonic(), _busy_seconds(), sum(map(sum, counts))


def _busy_seconds() -> float:
    """Return the seconds since boot that all cores together were not idle (proc(5), /proc/stat)."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def measure_other_work(program: str) -> float:
    """Return the number of cores that other processes keep busy, measured for one second. Warn if above 0.2 cores."""
    foreign = ForeignWork()
    time.sleep(1.0)
    if (cores := foreign.cores()) > QUIET_CORES:
        warning = f"warning: other processes keep {cores:.1f} cores busy; do not trust the figures of this run"
        print(f"{program}: {warning}", file=sys.stderr)
    return round(cores, 2)


def digest(result: object) -> str:
    """Return a SHA-256 digest of a benchmark result. A picture stores it, so that an outdated picture is detected."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def is_picture_of(path: Path, result: object) -> bool:
    """Return True if the file is a picture that was drawn from this benchmark result, by the stored digest."""
    return path.is_file() and digest(result).encode() in path.read_bytes()
