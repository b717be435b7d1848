"""Declaration of settings, and the command-line flags and help pages that follow from the declarations.

One field of a settings class defines flag, environment variable, default, bounds and help text.

A memory size is written as in Kubernetes: K, M, G and T are powers of 1,000; Ki, Mi, Gi and Ti are powers of 1,024. A B
after the unit changes nothing, and case is ignored. A number alone is in MiB, as in settings from before sizes had
units.
"""

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from pydantic import BeforeValidator, ByteSize, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "KVASIR_"
CONFIG = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")
AutoOrCount = Literal["auto"] | Annotated[int, Field(ge=1)]
CacheDtype = Literal["auto", "float16"]
# An environment variable separates several values as PATH does; a flag is repeated for each value.
LISTED = BeforeValidator(lambda value: value.split(os.pathsep) if isinstance(value, str) else value)


def _names(value: Iterable[str]) -> list[str]:
    words = [value] if isinstance(value, str) else value
    return [name for word in words for part in word.split(",") if (name := part.strip())]


_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([kmgt])(i?))?(b?)", re.IGNORECASE | re.ASCII)
_MAX_SIZE = 2**63


def _read_size(value: Any, words: str = "must be") -> ByteSize:
    """Parse a size. Raises ValueError: the text is not a size, or the size is under 1 byte."""
    if isinstance(value, ByteSize):
        return value
    matched = _SIZE.fullmatch(str(value).strip())
    if matched is None:
        raise ValueError(f"{words} a size such as 512MiB, 2GiB or 1.5G")
    number, unit, binary, byte = matched.groups()
    base = 1024 if binary else 1000
    factor = base ** ("kmgt".index(unit.lower()) + 1) if unit else 1 if byte else 2**20
    size = int(float(number) * factor)
    if not 1 <= size < _MAX_SIZE:
        raise ValueError(f"{words} at least 1 byte, such as 512MiB, 2GiB or 1.5G")
    return ByteSize(size)


def _read_auto_or_size(value: Any) -> Any:
    return value if value == "auto" else _read_size(value, "must be auto, or")


Size = Annotated[ByteSize, BeforeValidator(_read_size)]
AutoOrSize = Annotated[Literal["auto"] | ByteSize, BeforeValidator(_read_auto_or_size)]


# Names may contain the path separator, so commas separate names, in variables and in flags.
NAMES = BeforeValidator(_names)


def option(
    group: str,
    help_: str,
    default: Any = ...,
    *,
    metavar: str | None = None,
    default_text: str | None = None,
    older_name: str | None = None,
    **bounds: Any,
) -> Any:
    """Declare a setting.

    Args:
        group: section title on the help page.
        metavar: placeholder of the value on the help page. None derives it from the type.
        default_text: the default as the help page shows it; None shows the value. For a required setting: the place
            where the value is searched for.
        older_name: former name of the field. Its flag and its variable still work.
        bounds: constraints for pydantic's `Field`.
    """
    extra: dict[str, Any] = {"group": group, "metavar": metavar, "default_text": default_text, "older_name": older_name}
    return Field(default, description=help_, json_schema_extra=extra, **bounds)


def secret(group: str, help_: str) -> Any:
    """Declare a setting without a flag, because flags show in the list of processes. Its type is `SecretStr | None`."""
    return Field(
        None, description=help_, json_schema_extra={"group": group, "metavar": None, "older_name": None, "secret": True}
    )


class FlagError(ValueError):
    """Invalid command-line arguments. The message is one line and ends with a hint."""


def parse_flags(
    kind: type[BaseSettings], argv: Sequence[str], *, command: str, summary: str, epilog: str
) -> Mapping[str, Any]:
    """Parse `argv` into values by field name. Values stay strings; pydantic converts and checks them.

    Raises:
        FlagError: a flag is unknown, or its value is missing.
        SystemExit: `argv` contains `--help`.
    """
    secrets = [name for name in kind.model_fields if is_secret(kind, name)]
    for name in secrets:
        if any(word.partition("=")[0] == flag_of(name) for word in argv):
            raise FlagError(
                f"{flag_of(name)} is not a flag, because flags show in the list of processes; "
                f"set {variable_of(name)} instead"
            )
    notes = (f" {variable_of(name)}: {kind.model_fields[name].description}." for name in secrets)
    parser = _parser(kind, command, summary, epilog + "".join(notes))
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        # A single unknown argument that is a directory is probably a checkpoint without `--checkpoint`.
        is_checkpoint = "checkpoint" in kind.model_fields and len(unknown) == 1 and Path(unknown[0]).is_dir()
        hint = f"did you mean --checkpoint {unknown[0]}?" if is_checkpoint else f"see {parser.prog} --help"
        raise FlagError(f"unrecognized arguments: {' '.join(unknown)}; {hint}")
    return vars(given)


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """Return the environment variable of a field."""
    return PREFIX + name.upper()


def is_secret(kind: type[BaseSettings], name: str) -> bool:
    """Return True if a field has no flag and its value must not be shown."""
    extra = kind.model_fields[name].json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("secret"))


def older_names(kind: type[BaseSettings]) -> dict[str, str]:
    """Return the earlier name of each field that has one."""
    extras = ((name, field.json_schema_extra) for name, field in kind.model_fields.items())
    return {name: str(extra["older_name"]) for name, extra in extras if isinstance(extra, dict) and extra["older_name"]}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(f"{message}; see {self.prog} --help")


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


def _parser(kind: type[BaseSettings], command: str, summary: str, epilog: str) -> _Parser:
    """Build the parser: one flag per field, by group."""
    parser = _Parser(
        prog=f"kvasir {command}",
        description=summary,
        epilog=epilog,
        formatter_class=_Help,
        usage=f"kvasir {command} [flags]",
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    older = older_names(kind)
    for name, field in kind.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict), f"{name} must be declared with `option`"
        if is_secret(kind, name):
            continue
        title = str(extra["group"])
        group = groups[title] if title in groups else groups.setdefault(title, parser.add_argument_group(title))
        default_text = extra.get("default_text")
        is_needed = field.is_required() and not default_text
        default = f" (default: {default_text or field.default})"
        if is_needed or field.default is None or field.default is False or field.default == ():
            default = ""
        group.add_argument(
            *map(flag_of, filter(None, (name, older.get(name)))),
            dest=name,
            default=argparse.SUPPRESS,
            help=f"{field.description}{default}{' (required)' if is_needed else ''}".replace("%", "%%"),
            **_argument(field.annotation, default=field.default, metavar=extra["metavar"]),
        )
    return parser


def _argument(annotation: Any, *, default: Any, metavar: object) -> dict[str, Any]:
    """Return argparse options. A switch that is on by default also has a --no- form; a tuple's flag is repeated."""
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction} if default else {"action": "store_const", "const": "true"}
    if get_origin(annotation) is tuple:
        return {"action": "append", "metavar": metavar}
    return {"metavar": metavar or _metavar(annotation)}


def _metavar(annotation: Any) -> str:
    """Return the placeholder of a value: the choices of a Literal, else a word for the type."""
    if annotation in (int, float, str, Path, ByteSize):
        return {int: "N", float: "X", str: "TEXT", Path: "DIR", ByteSize: "SIZE"}[annotation]
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return "|".join(parts)
    if get_origin(annotation) is Annotated:
        return _metavar(parts[0])
    return "|".join(_metavar(part) for part in parts if part is not type(None))
