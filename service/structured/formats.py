"""The wire contract of structured output: OpenAI's `response_format`, and `structured_outputs` as vLLM has it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from service.errors import InvalidRequest
from service.request_model import RequestModel

MAX_SCHEMA_CHARACTERS = 256_000
MAX_REGEX_CHARACTERS = 16_000
MAX_GRAMMAR_CHARACTERS = 64_000
MAX_WORDS = 1024
# A schema is JSON of any shape, so that its properties may be named as they like.
Schema = Annotated[dict[str, Any], Field(description=f"a JSON Schema of up to {MAX_SCHEMA_CHARACTERS} characters")]
Regex = Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARACTERS)]
Grammar = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Word = Annotated[str, Field(min_length=1, max_length=1000)]
Words = Annotated[list[Word], Field(min_length=1, max_length=MAX_WORDS, fail_fast=True)]


class Kind(StrEnum):
    """The languages in which a completion can be described."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a completion has to follow, and where in the request it stands.

    `lenient`: keywords of a schema that cannot be enforced are passed over.
    """

    kind: Kind
    content: Any
    param: str
    lenient: bool = False


class JsonSchemaFormat(RequestModel):
    """`response_format.json_schema`. `name` and `description` are for people; the model is not told them."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: Annotated[bool, Field(description="false passes over keywords that cannot be enforced")] | None = True
    description: str | None = None


class ResponseFormat(RequestModel):
    """`response_format`: any text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def parts(self) -> Iterator[tuple[str, RequestModel]]:
        """See `RequestModel`."""
        yield "response_format.", self
        if self.json_schema is not None:
            yield "response_format.json_schema.", self.json_schema

    def wanted(self) -> Wanted | None:
        """What is to be followed; None for any text.

        Raises:
            InvalidRequest: a schema is missing, too long, or there is one that nothing asks for.
        """
        if (self.json_schema is None) is (self.type == "json_schema"):
            told = "needs json_schema" if self.json_schema is None else "takes no json_schema"
            raise InvalidRequest(f"response_format: type {self.type} {told}", param="response_format.json_schema")
        if self.type == "text":
            return None
        if self.json_schema is None:
            return Wanted(Kind.JSON, {"type": "object"}, "response_format")
        param = "response_format.json_schema.schema"
        lenient = self.json_schema.strict is False
        return Wanted(Kind.JSON, _checked(self.json_schema.schema_, param), param, lenient)


class StructuredOutputs(RequestModel):
    """`structured_outputs`: exactly one of its fields. `grammar` is Lark's notation or GBNF."""

    json_: Annotated[Schema | str | None, Field(alias="json", description="a JSON Schema, or its text")] = None
    regex: Regex | None = None
    choice: Words | None = None
    grammar: Grammar | None = None

    def parts(self) -> Iterator[tuple[str, RequestModel]]:
        """See `RequestModel`."""
        yield "structured_outputs.", self

    def wanted(self) -> Wanted:
        """What is to be followed.

        Raises:
            InvalidRequest: there is none, or several, or a schema that is too long or not JSON.
        """
        fields: dict[Kind, Any] = {
            Kind.JSON: self.json_,
            Kind.REGEX: self.regex,
            Kind.CHOICE: self.choice,
            Kind.GRAMMAR: self.grammar,
        }
        given = [(kind, content) for kind, content in fields.items() if content is not None]
        if len(given) != 1:
            told = ", ".join(kind for kind, _ in given) or "none"
            raise InvalidRequest(
                f"structured_outputs takes exactly one of json, regex, choice and grammar, not {told}",
                param="structured_outputs",
            )
        ((kind, content),) = given
        param = f"structured_outputs.{kind}"
        return Wanted(kind, _checked(content, param) if kind is Kind.JSON else content, param)


def wanted_output(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> Wanted | None:
    """What a completion has to follow; None for any text.

    Raises:
        InvalidRequest: two things, or see `wanted` of either.
    """
    wanted = None if response_format is None else response_format.wanted()
    if structured is None:
        return wanted
    if wanted is not None:
        raise InvalidRequest("give response_format or structured_outputs, not both", param="structured_outputs")
    return structured.wanted()


def _checked(schema: dict[str, Any] | str, param: str) -> dict[str, Any]:
    """A schema that is not too long.

    Raises:
        InvalidRequest: it is, or it is no JSON object.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise InvalidRequest(
            f"{param} has {len(text)} characters, at most {MAX_SCHEMA_CHARACTERS} are allowed", param=param
        )
    if isinstance(schema, dict):
        return schema
    try:
        parsed = from_json(text)  # unlike json.loads it ends at a depth, as that of the body did
    except ValueError as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param=param) from None
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"{param} must be a JSON object, as text or as it is", param=param)
    return parsed
