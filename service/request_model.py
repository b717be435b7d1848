"""What every request is, whatever stands in it."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict


class RequestModel(BaseModel):
    """What every request is: strict, frozen, and nothing unknown in it."""

    # `parse_body` refuses unknown fields: pydantic's own refusal lists them all, which takes 0.7 s for 2 MB.
    model_config = ConfigDict(
        strict=True,
        extra="allow",
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},
    )

    def parts(self) -> Iterator[tuple[str, "RequestModel"]]:
        """This object and those within it, each with what stands before the names of its fields."""
        yield "", self
