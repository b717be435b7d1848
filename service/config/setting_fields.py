"""Declaration of settings: one field defines flag, environment variable, default, bounds and help text."""

import os
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import SettingsConfigDict

PREFIX = "KVASIR_"
CONFIG = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")
AutoOrCount = Literal["auto"] | Annotated[int, Field(ge=1)]
# Default of --checkpoint on every help page; `service.config.default_checkpoint` finds the directory.
CHECKPOINT_DEFAULT = "checkpoints/kvasir-9m in the working directory, else beside the package"
CacheDtype = Literal["auto", "float16"]
# An environment variable separates several values as PATH does; a flag is repeated for each value.
LISTED = BeforeValidator(lambda value: value.split(os.pathsep) if isinstance(value, str) else value)


def _names(value: Iterable[str]) -> list[str]:
    words = [value] if isinstance(value, str) else value
    return [name for word in words for part in word.split(",") if (name := part.strip())]


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
