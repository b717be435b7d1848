"""How a setting is declared: one field, from which flag, variable, default, bounds and help all come."""

import os
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import SettingsConfigDict

PREFIX = "KVASIR_"
CONFIG = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")
AutoOrCount = Literal["auto"] | Annotated[int, Field(ge=1)]
# What the help page says of every --checkpoint; `service.default_checkpoint` looks for it.
CHECKPOINT_DEFAULT = "checkpoints/kvasir-9m in the working directory, else beside the package"
CacheDtype = Literal["auto", "float16"]
# A variable holds several values as PATH does; flags give one each.
LISTED = BeforeValidator(lambda value: value.split(os.pathsep) if isinstance(value, str) else value)


def _names(value: Iterable[str]) -> list[str]:
    words = [value] if isinstance(value, str) else value
    return [name for word in words for part in word.split(",") if (name := part.strip())]


# Names may hold what stands between paths; commas stand between them, in variables and flags.
NAMES = BeforeValidator(_names)


def option(
    group: str,
    help_: str,
    default: Any = ...,
    *,
    metavar: str | None = None,
    told: str | None = None,
    older_name: str | None = None,
    **bounds: Any,
) -> Any:
    """A setting.

    Args:
        group: under which title the help page shows it.
        metavar: what its value looks like there; by its type where none is given.
        told: what is said of the default there; its value where none is given. Of a required setting: where its value
            is looked for.
        older_name: of the field; its flag and its variable still work.
        bounds: what pydantic's `Field` checks.
    """
    extra: dict[str, Any] = {"group": group, "metavar": metavar, "told": told, "older_name": older_name}
    return Field(default, description=help_, json_schema_extra=extra, **bounds)


def secret(group: str, help_: str) -> Any:
    """A setting without a flag, since flags show in the list of processes. Its type is `SecretStr | None`."""
    return Field(
        None, description=help_, json_schema_extra={"group": group, "metavar": None, "older_name": None, "secret": True}
    )
