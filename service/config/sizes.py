"""Memory sizes in settings, such as 512M, 2GiB or 1.5g, with the units of Kubernetes and pydantic's `ByteSize`.

K, M, G and T are powers of 1,000; Ki, Mi, Gi and Ti are powers of 1,024. A B after the unit changes nothing, and case
is ignored. A number alone is in MiB, for compatibility with settings from before sizes had units.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, TypeAdapter, ValidationError

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*((?:[kmgt]i?)?b?)", re.IGNORECASE | re.ASCII)
_BYTE_SIZE = TypeAdapter(ByteSize)
_EXAMPLES = "512MiB, 2GiB or 1.5G"


def _read_size(value: Any) -> Any:
    """Parse a size. Raises ValueError: the text is not a size, or the size is under 1 byte."""
    if isinstance(value, ByteSize):
        return value
    given = _SIZE.fullmatch(str(value).strip())
    if given is None:
        raise ValueError(f"must be a size such as {_EXAMPLES}")
    number, unit = given.groups()
    if unit.lower().endswith("i"):
        unit += "B"
    try:
        size = _BYTE_SIZE.validate_python(number + (unit or "MiB"))
    except ValidationError:
        raise ValueError(f"must be a size such as {_EXAMPLES}") from None
    if size < 1:
        raise ValueError(f"must be at least 1 byte, such as {_EXAMPLES}")
    return size


def _read_auto_or_size(value: Any) -> Any:
    """Parse "auto" or a size. Raises ValueError."""
    if value == "auto":
        return value
    try:
        return _read_size(value)
    except ValueError as error:
        raise ValueError(str(error).replace("must be ", "must be auto, or ", 1)) from None


Size = Annotated[ByteSize, BeforeValidator(_read_size)]
AutoOrSize = Annotated[Literal["auto"] | ByteSize, BeforeValidator(_read_auto_or_size)]
