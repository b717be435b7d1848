"""Command-line flags and help page of a command, generated from the fields of its settings class."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from pydantic import ByteSize
from pydantic_settings import BaseSettings

from service.config.setting_fields import PREFIX


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
