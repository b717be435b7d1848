"""Declaration of settings: one field defines flag, environment variable, default, bounds and help text.

A memory size is written as in Kubernetes: K, M, G and T are powers of 1,000; Ki, Mi, Gi and Ti are powers of 1,024. A B
after the unit changes nothing, and case is ignored. A number alone is in MiB, as in settings from before sizes had
units.
"""

import os
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field
from pydantic_settings import SettingsConfigDict

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
