"""Declaration of settings: a field is a flag, an environment variable, a default and bounds; its docstring is the help.

A memory size is written as in Kubernetes: K, M, G and T are powers of 1,000; Ki, Mi, Gi and Ti are powers of 1,024. A
final B changes nothing, and case is ignored. A number alone is in MiB.
"""

import argparse
import ast
import difflib
import functools
import inspect
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, SecretStr

PREFIX = "KVASIR_"
FORMER_NAMES: Mapping[str, str] = {"max_body_size": "max_body_mb"}  # by field; accepted for one more version
# Without a width, argparse wraps help pages at the width of the terminal: 80 columns in a pipe.
HELP_FORMATTER = functools.partial(argparse.HelpFormatter, max_help_position=30, width=100)
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([kmgt])(i?))?(b?)", re.IGNORECASE | re.ASCII)


class SettingsError(ValueError):
    """Error of an unknown, missing or invalid flag or environment variable, which its one-line message names."""


class CommandSettings(BaseModel):
    """Base class of the settings of a command: immutable; an unknown field is an error.

    POSITIONAL: fields that may also be given without their flags, in this order.
    """

    POSITIONAL: ClassVar[tuple[str, ...]] = ()
    # defer_build: of the settings of all commands, only those of one are validated in a process, and none in a worker.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, defer_build=True)


def _split_paths(value: Any) -> Any:
    return value.split(os.pathsep) if isinstance(value, str) else value


def _split_names(value: Iterable[str]) -> list[str]:
    words = [value] if isinstance(value, str) else value
    return [name for word in words for part in word.split(",") if (name := part.strip())]


def _read_size(value: Any, alternative: str = "") -> ByteSize:
    if isinstance(value, ByteSize):
        return value
    matched = _SIZE.fullmatch(str(value).strip())
    if matched is None:
        raise ValueError(f"must be {alternative}a size such as 512MiB, 2GiB or 1.5G")
    number, unit, binary, byte = matched.groups()
    factor = (1024 if binary else 1000) ** ("kmgt".index(unit.lower()) + 1) if unit else 1 if byte else 2**20
    size = int(float(number) * factor)
    if not 1 <= size < 2**63:
        raise ValueError(f"must be {alternative}a size of at least 1 byte, such as 512MiB, 2GiB or 1.5G")
    return ByteSize(size)


def _read_auto_or_size(value: Any) -> Any:
    return value if value == "auto" else _read_size(value, "auto, or ")


def _check_output_file(path: Path) -> Path:
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError("must be a file that can be written, in an existing directory")
    return path


AutoOrCount = Literal["auto"] | Annotated[int, Field(ge=1)]
Size = Annotated[ByteSize, BeforeValidator(_read_size)]
AutoOrSize = Annotated[Literal["auto"] | ByteSize, BeforeValidator(_read_auto_or_size)]
OutputFile = Annotated[Path, AfterValidator(_check_output_file)]  # checked before minutes of computation
# A flag is repeated for each value. An environment variable separates values as PATH does; names, which may contain
# that separator, are separated by commas.
Paths = Annotated[tuple[Path, ...], BeforeValidator(_split_paths)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_split_paths)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split_names)]


def option(
    group: str, default: Any = ..., *, metavar: str | None = None, default_text: str | None = None, **bounds: Any
) -> Any:
    """Declare a settings field. `group`: section of the help page. `default_text`: default shown on the help page."""
    extra: dict[str, Any] = {"group": group, "metavar": metavar, "default_text": default_text}
    return Field(default, json_schema_extra=extra, **bounds)


def parse_flags(kind: type[CommandSettings], argv: Sequence[str], *, command: str, summary: str) -> dict[str, Any]:
    """Parse the command line `argv`. Return the value of each given flag by settings field, not validated yet.

    Prints the help page and exits for --help. Raises SettingsError for an unknown flag or a missing value.
    """
    help_texts = _help_texts(kind) if {"-h", "--help"} & set(argv) else dict.fromkeys(kind.model_fields, "")
    parser = _Parser(
        prog=f"kvasir {command}",
        description=summary,
        formatter_class=HELP_FORMATTER,
        usage=" ".join([f"kvasir {command} [flags]", *(f"[{name.upper()}]" for name in kind.POSITIONAL)]),
        allow_abbrev=False,
    )
    epilog = f"Every flag is also an environment variable: --max-thing is {PREFIX}MAX_THING. A flag takes precedence."
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in kind.model_fields.items():
        flag, variable, extra = flag_of(name), variable_of(name), field.json_schema_extra
        assert isinstance(extra, dict), f"{name} must be declared with `option`"
        if is_secret(kind, name):
            epilog += f" {variable}: {help_texts[name]}."
            if any(word.partition("=")[0] == flag for word in argv):
                raise SettingsError(
                    f"{flag} is not a flag, because flags show in the list of processes; set {variable} instead"
                )
            continue
        title, default_text = str(extra["group"]), extra["default_text"]
        is_needed = field.is_required() and not default_text
        has_default = not is_needed and field.default is not False and field.default not in (None, ())
        default = f" (default: {default_text or field.default})" if default_text or has_default else ""
        note = " (required)" if is_needed else ""
        if name in kind.POSITIONAL:
            note += f" ({name.upper()}: the flag can be left out)"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(
            *(flag_of(each) for each in (name, FORMER_NAMES.get(name)) if each),
            dest=name,
            default=argparse.SUPPRESS,
            help=f"{help_texts[name]}{default}{note}".replace("%", "%%"),
            **_argument(field.annotation, default=field.default, metavar=extra["metavar"]),
        )
    parser.epilog = epilog
    given, unknown = parser.parse_known_args(argv)
    for name in kind.POSITIONAL:
        if unknown and not unknown[0].startswith("-") and name not in given:
            setattr(given, name, unknown.pop(0))
    if unknown:
        meant = difflib.get_close_matches(unknown[0].partition("=")[0], map(flag_of, kind.model_fields), 1, 0.7)
        hint = f"did you mean {meant[0]}?" if meant else f"see {parser.prog} --help"
        raise SettingsError(f"unrecognized arguments: {' '.join(unknown)}; {hint}")
    return vars(given)


def flag_of(name: str) -> str:
    """Return the flag of a settings field, such as --max-thing. A last underscore, as in `json_`, is left out."""
    return "--" + name.rstrip("_").replace("_", "-")


def variable_of(name: str) -> str:
    """Return the environment variable of a settings field, such as KVASIR_MAX_THING, without a last underscore."""
    return PREFIX + name.rstrip("_").upper()


def is_secret(kind: type[CommandSettings], name: str) -> bool:
    """Return True if a settings field is secret: it has no flag, because the list of processes shows flags."""
    return SecretStr in get_args(kind.model_fields[name].annotation)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see {self.prog} --help")


def _help_texts(kind: type[CommandSettings]) -> dict[str, str]:
    """Return the help text of each settings field: its docstring. Slow (parses source code), so only for --help."""
    texts = {}
    for owner in kind.__mro__[: kind.__mro__.index(CommandSettings)]:
        (tree,) = ast.parse(inspect.getsource(owner)).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in itertools.pairwise(tree.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    texts[name] = " ".join(words.split())
    return texts


def _argument(annotation: Any, *, default: Any, metavar: object) -> dict[str, Any]:
    """Return argparse options of a flag. A switch on by default also has a --no- form; a tuple's flag is repeated."""
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction} if default else {"action": "store_const", "const": "true"}
    if get_origin(annotation) is tuple:
        return {"action": "append", "metavar": metavar}
    return {"metavar": metavar or _metavar(annotation)}


def _metavar(annotation: Any) -> str:
    """Return the placeholder of a flag's value on the help page: the choices of a Literal, else a word for the type."""
    if annotation in (int, float, str, Path, ByteSize):
        return {int: "N", float: "X", str: "TEXT", Path: "DIR", ByteSize: "SIZE"}[annotation]
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return "|".join(parts)
    if get_origin(annotation) is Annotated:
        return _metavar(parts[0])
    return "|".join(_metavar(part) for part in parts if part is not type(None))
