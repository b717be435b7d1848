"""Base class of all request bodies."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict


class RequestModel(BaseModel):
    """Base class of request bodies: strict types, immutable, no unknown fields."""

    # `parse_body` rejects unknown fields. Pydantic's `forbid` lists every unknown field, which takes 0.7 s for 2 MB.
    model_config = ConfigDict(
        strict=True,
        extra="allow",
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},
    )

    def parts(self) -> Iterator[tuple[str, "RequestModel"]]:
        """Yield this object and its nested objects, each with its field prefix ("stream_options.")."""
        yield "", self
