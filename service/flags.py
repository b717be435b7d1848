"""The flags of a command, made of the fields of its settings: what they are called, what the help page says."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from pydantic import ByteSize
from pydantic_settings import BaseSettings

from service.options import PREFIX


class FlagError(ValueError):
    """Arguments that are none of the command's, in one line with where to look."""


def parse_flags(
    kind: type[BaseSettings], argv: Sequence[str], *, command: str, summary: str, epilog: str
) -> Mapping[str, Any]:
    """The values that were given, by field. They stay strings: pydantic converts and checks them.

    Raises:
        FlagError: an unknown flag, or one without its value.
        SystemExit: `--help` was asked for.
    """
    secrets = [name for name in kind.model_fields if is_secret(kind, name)]
    for name in secrets:
        if any(word.partition("=")[0] == flag_of(name) for word in argv):
            raise FlagError(
                f"{flag_of(name)} is no flag, since flags show in the list of processes; "
                f"set {variable_of(name)} instead"
            )
    told = (f" {variable_of(name)}: {kind.model_fields[name].description}." for name in secrets)
    parser = _parser(kind, command, summary, epilog + "".join(told))
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}", directory=_directory(kind, unknown))
    return vars(given)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of a field."""
    return PREFIX + name.upper()


def is_secret(kind: type[BaseSettings], name: str) -> bool:
    """Whether a field has no flag, and its value is not to be shown."""
    extra = kind.model_fields[name].json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("secret"))


def older_names(kind: type[BaseSettings]) -> dict[str, str]:
    """Return the earlier name of each field that has one."""
    extras = ((name, field.json_schema_extra) for name, field in kind.model_fields.items())
    return {name: str(extra["older_name"]) for name, extra in extras if isinstance(extra, dict) and extra["older_name"]}


def _directory(kind: type[BaseSettings], unknown: Sequence[str]) -> str | None:
    """What was meant as the checkpoint, perhaps: a directory without a flag."""
    is_one = "checkpoint" in kind.model_fields and len(unknown) == 1 and Path(unknown[0]).is_dir()
    return unknown[0] if is_one else None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str, *, directory: str | None = None) -> NoReturn:
        hint = f"see {self.prog} --help" if directory is None else f"did you mean --checkpoint {directory}?"
        raise FlagError(f"{message}; {hint}")


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


def _parser(kind: type[BaseSettings], command: str, summary: str, epilog: str) -> _Parser:
    """Flags of every field, by group."""
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
        is_switch, told = field.annotation is bool, extra.get("told")
        needed = field.is_required() and not told
        default = f" (default: {told or field.default})"
        if needed or field.default is None or field.default is False or field.default == ():
            default = ""
        group.add_argument(
            *map(flag_of, filter(None, (name, older.get(name)))),
            dest=name,
            default=argparse.SUPPRESS,
            help=f"{field.description}{default}{' (needed)' if needed else ''}".replace("%", "%%"),
            **(_switch(field.default) if is_switch else _value(field.annotation, extra["metavar"])),
        )
    return parser


def _switch(default: bool) -> dict[str, Any]:
    """What is off is switched on by its name; what is on has a --no- form as well."""
    return {"action": argparse.BooleanOptionalAction} if default else {"action": "store_const", "const": "true"}


def _value(annotation: Any, metavar: object) -> dict[str, Any]:
    """What takes a value; a tuple's is given once for each of its items."""
    if get_origin(annotation) is tuple:
        return {"action": "append", "metavar": metavar}
    return {"metavar": metavar or _metavar(annotation)}


def _metavar(annotation: Any) -> str:
    """What a value looks like: the choices of a Literal, else the type."""
    if annotation in (int, float, str, Path, ByteSize):
        return {int: "N", float: "X", str: "TEXT", Path: "DIR", ByteSize: "SIZE"}[annotation]
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return "|".join(parts)
    if get_origin(annotation) is Annotated:
        return _metavar(parts[0])
    return "|".join(_metavar(part) for part in parts if part is not type(None))
