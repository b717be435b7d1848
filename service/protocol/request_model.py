"""Base class of request bodies: strict validation, with errors that name the field."""

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from service.config.validation_messages import reword, unknown_field
from service.protocol.errors import InvalidRequest

# Minimum similarity of two names, from 0 to 1, at which an unknown field counts as a misspelt known field.
_LEAST_SIMILARITY = 0.8
_MAX_FOREIGN_FIELDS = 32  # different names of ignored unknown fields in a request
_INDEX = re.compile(r"\[\d+\]")
MAX_PROMPTS = MAX_MESSAGES = 4096
# fail_fast: a million wrong items make one error. `RequestProcessor` checks the bounds of the vocabulary.
TokenIds = Annotated[list[Annotated[int, Field(ge=-(2**63), lt=2**63)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
Prompts = Annotated[
    str | Texts | TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)],
    Field(description=f"a string or a list of token ids, or a list of up to {MAX_PROMPTS} such prompts"),
]
ParseSpecial = Annotated[
    bool | None,
    Field(description="parse names of special tokens in a text as these tokens (default: --parse-special)"),
]
PROMPTS_ERROR = f"must be a string, a list of token ids, or a list of up to {MAX_PROMPTS} strings or token-id lists"
NUM_KEPT_ERROR = "must be a whole number from 1, or -1 to keep as many tokens as the context allows"


class Unsupported:
    """Annotation of an unsupported field: only null and the values in `neutral`, which change nothing, are accepted."""

    def __init__(self, *neutral: Any, remedy: str = "leave it out") -> None:
        self._neutral, self._remedy = neutral, remedy

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self._neutral]}

    def _check(self, value: Any) -> Any:
        if value is not None and not any(type(value) is type(each) and value == each for each in self._neutral):
            raise PydanticCustomError("unsupported", f"is not supported by this server; {self._remedy}")
        return value


class Ignored:
    """Annotation of a field that common clients send and that cannot change a response of this server.

    Any value is accepted. The response names the field in the header `x-ignored-fields`.
    """

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"description": "accepted and ignored"}


IGNORED = Annotated[Any, Ignored()]


def _close_schema(schema: dict[str, Any], model: type["RequestModel"]) -> None:
    """Set `additionalProperties` in a model's JSON Schema: false if unknown fields are rejected, else true."""
    schema["additionalProperties"] = model.IGNORES_UNKNOWN


class RequestModel(BaseModel):
    """Base class of request bodies. Immutable, and strict: "1" is not a number, and unknown fields are rejected.

    A subclass with `IGNORES_UNKNOWN` accepts unknown fields, unless a name is almost that of a known field.
    """

    # `parse` rejects unknown fields. Pydantic's `forbid` lists every unknown field, which takes 0.7 s for 2 MB.
    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, allow_inf_nan=False, json_schema_extra=_close_schema
    )
    # Error messages of fields with a union type, for which pydantic reports one error per branch.
    UNION_ERRORS: ClassVar[Mapping[str, str]] = {}
    # Names of fields in other APIs, and the fields with this meaning here. An error suggests the field.
    OTHER_NAMES: ClassVar[Mapping[str, str]] = {}
    # Ignore unknown fields, unless a field's name is almost that of a known field.
    IGNORES_UNKNOWN: ClassVar[bool] = False

    @property
    def ignored_fields(self) -> list[str]:
        """Names of the fields that the client sent and that are ignored, such as `messages[].cache_control`."""
        return list(dict.fromkeys(_find_ignored_fields(self)))

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse and validate a JSON body. Raises InvalidRequest, which names the field of the first error."""
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            raise cls._explain(error, body) from None
        if (unknown := _find_unknown_field(request, set())) is not None:
            *above, name = unknown.rpartition(".")
            near = difflib.get_close_matches(name, cls.model_fields, n=1, cutoff=_LEAST_SIMILARITY)
            meant = cls.OTHER_NAMES.get(name, next(iter(near), None))
            remedy = "leave it out" if meant is None or any(above) else f"did you mean {meant}?"
            raise InvalidRequest(f"unknown field: {unknown}; {remedy}", param=unknown)
        request.check_fields()
        return request

    def check_fields(self) -> None:
        """Raise InvalidRequest for fields that contradict or need each other. Subclasses override this method."""

    @classmethod
    def _explain(cls, error: ValidationError, body: bytes) -> InvalidRequest:
        """Convert the first of pydantic's errors about a request body to a sentence that names the field."""
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        kind, place = first["type"], first["loc"]
        if kind == "json_invalid":
            return InvalidRequest(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
        if not place:
            return InvalidRequest("the body must be a JSON object")
        name = _field_name(place)
        if kind == "missing":
            unknown = unknown_field(cls.model_fields, body) if len(place) == 1 else None
            prefix = "" if unknown is None else f"unknown field: {unknown}; "
            return InvalidRequest(f"{prefix}{name} is required", param=name if unknown is None else unknown)
        # An error of a union's branch has a longer path than the field.
        field = place[2:] if place[0] == "messages" else place
        wanted = cls.UNION_ERRORS.get(str(field[0])) if len(field) > 1 else None
        return InvalidRequest.of(name, f" {reword(kind, first['msg']) if wanted is None else wanted}")


def _find_unknown_field(model: RequestModel, foreign: set[str], prefix: str = "") -> str | None:
    """Return the path of the first unknown field to reject, such as `tools[0].x`; None without one.

    foreign: unknown names in this request that were accepted, and ignored, so far; this call adds to them.
    """
    for name in model.__pydantic_extra__ or ():
        if name in foreign:
            continue
        # A comparison takes 0.1 ms, so each name is compared once, and the number of names is limited.
        is_typo = difflib.get_close_matches(name[:100], type(model).model_fields, n=1, cutoff=_LEAST_SIMILARITY)
        if not model.IGNORES_UNKNOWN or is_typo or len(foreign) >= _MAX_FOREIGN_FIELDS:
            return prefix + name[:100]
        foreign.add(name)
    for place, part in _nested_models(model, prefix):
        if (unknown := _find_unknown_field(part, foreign, place)) is not None:
            return unknown
    return None


def _find_ignored_fields(model: RequestModel, prefix: str = "") -> Iterator[str]:
    for name in model.__pydantic_extra__ or ():
        yield prefix + name[:100]
    for name in model.__pydantic_fields_set__ & _ignored_names(type(model)):
        if getattr(model, name) is not None:
            yield prefix + name
    for place, part in _nested_models(model, prefix):
        yield from _find_ignored_fields(part, _INDEX.sub("[]", place))


@functools.cache
def _ignored_names(model: type[RequestModel]) -> frozenset[str]:
    fields = model.model_fields.items()
    return frozenset(name for name, field in fields if any(isinstance(each, Ignored) for each in field.metadata))


def _nested_models(model: RequestModel, prefix: str) -> list[tuple[str, "RequestModel"]]:
    """Return the request models inside a model's fields, each with its prefix of field names, such as `tools[0].`."""
    found: list[tuple[str, RequestModel]] = []
    values = model.__dict__
    for name in model.__pydantic_fields_set__:
        value = values.get(name)
        if isinstance(value, RequestModel):
            found.append((f"{prefix}{name}.", value))
        elif value.__class__ is list and value and isinstance(value[0], RequestModel):
            found += [(f"{prefix}{name}[{number}].", item) for number, item in enumerate(value)]
    return found


def _field_name(place: tuple[int | str, ...]) -> str:
    """Return the request field, such as "messages[0].content", of an error's path in pydantic's form."""
    if place[0] in ("stream_options", "response_format", "structured_outputs"):
        depth = 3 if place[:2] == ("response_format", "json_schema") else 2
        return ".".join(map(str, place[:depth]))
    if place[0] == "chat_template_kwargs":
        return ".".join(str(part)[:100] for part in place[:2])
    if place[0] == "tools" and len(place) > 1:
        return f"tools[{place[1]}]" + "".join(f".{part}" for part in place[2:4])
    if place[0] == "messages" and len(place) > 1:
        return f"messages[{place[1]}]" + "".join(f".{part}" for part in place[2:3])
    return str(place[0])


def split_prompts(
    value: str | list[str] | list[int] | list[list[int]], name: str, *, can_be_empty: bool = False
) -> list[str | list[int]]:
    """Return the prompts in the request field `name` as a list. Raises InvalidRequest for no prompt or an empty one.

    can_be_empty: accept empty prompts.
    """
    is_single = isinstance(value, str) or (value and isinstance(value[0], int))
    prompts: list[str | list[int]] = [value] if is_single else value  # type: ignore[assignment, list-item]
    if not prompts or not (can_be_empty or all(prompts)):
        raise InvalidRequest.of(name, " must not be empty, nor contain an empty prompt")
    return prompts
