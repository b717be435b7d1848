"""Request fields of structured output: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from service.protocol.errors import InvalidRequest
from service.protocol.request_model import RequestModel

MAX_SCHEMA_CHARACTERS = 256_000
MAX_REGEX_CHARACTERS = 16_000
MAX_GRAMMAR_CHARACTERS = 64_000
MAX_WORDS = 1024
# Any JSON object: a schema has no fixed set of keys to validate here.
Schema = Annotated[dict[str, Any], Field(description=f"a JSON Schema of up to {MAX_SCHEMA_CHARACTERS} characters")]
Regex = Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARACTERS)]
Grammar = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Word = Annotated[str, Field(min_length=1, max_length=1000)]
Words = Annotated[list[Word], Field(min_length=1, max_length=MAX_WORDS, fail_fast=True)]


class Kind(StrEnum):
    """Languages in which a client can constrain a completion."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """Constraint that a completion must follow, and the request field (`param`) that set it.

    If `lenient`, schema keywords that cannot be enforced are ignored.
    """

    kind: Kind
    content: Any
    param: str
    lenient: bool = False


class JsonSchemaFormat(RequestModel):
    """Field `response_format.json_schema`. The model sees neither `name` nor `description`."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: Annotated[bool, Field(description="if false, keywords that cannot be enforced are ignored")] | None = True
    description: str | None = None


class ResponseFormat(RequestModel):
    """Field `response_format`: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def parts(self) -> Iterator[tuple[str, RequestModel]]:
        """See `RequestModel`."""
        yield "response_format.", self
        if self.json_schema is not None:
            yield "response_format.json_schema.", self.json_schema

    def wanted(self) -> OutputConstraint | None:
        """Return the constraint, or None for any text.

        Raises:
            InvalidRequest: the schema is missing or too long, or is given for a type other than `json_schema`.
        """
        if (self.json_schema is None) is (self.type == "json_schema"):
            problem = "needs json_schema" if self.json_schema is None else "takes no json_schema"
            raise InvalidRequest(f"response_format: type {self.type} {problem}", param="response_format.json_schema")
        if self.type == "text":
            return None
        if self.json_schema is None:
            return OutputConstraint(Kind.JSON, {"type": "object"}, "response_format")
        param = "response_format.json_schema.schema"
        lenient = self.json_schema.strict is False
        return OutputConstraint(Kind.JSON, _checked(self.json_schema.schema_, param), param, lenient)


class StructuredOutputs(RequestModel):
    """Field `structured_outputs`: exactly one of its subfields. `grammar` is in Lark syntax or GBNF."""

    json_: Annotated[
        Schema | str | None, Field(alias="json", description="a JSON Schema, as an object or as a string of JSON")
    ] = None
    regex: Regex | None = None
    choice: Words | None = None
    grammar: Grammar | None = None

    def parts(self) -> Iterator[tuple[str, RequestModel]]:
        """See `RequestModel`."""
        yield "structured_outputs.", self

    def wanted(self) -> OutputConstraint:
        """Return the constraint.

        Raises:
            InvalidRequest: no subfield or several are set, or the schema is too long or not a JSON object.
        """
        fields: dict[Kind, Any] = {
            Kind.JSON: self.json_,
            Kind.REGEX: self.regex,
            Kind.CHOICE: self.choice,
            Kind.GRAMMAR: self.grammar,
        }
        given = [(kind, content) for kind, content in fields.items() if content is not None]
        if len(given) != 1:
            names = ", ".join(kind for kind, _ in given) or "none"
            raise InvalidRequest(
                f"structured_outputs takes exactly one of json, regex, choice and grammar, not {names}",
                param="structured_outputs",
            )
        ((kind, content),) = given
        param = f"structured_outputs.{kind}"
        return OutputConstraint(kind, _checked(content, param) if kind is Kind.JSON else content, param)


def output_constraint(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> OutputConstraint | None:
    """Return the constraint that a request sets, or None for any text.

    Raises:
        InvalidRequest: both fields set a constraint, or one of them is invalid (see `wanted`).
    """
    wanted = None if response_format is None else response_format.wanted()
    if structured is None:
        return wanted
    if wanted is not None:
        raise InvalidRequest("give response_format or structured_outputs, not both", param="structured_outputs")
    return structured.wanted()


def _checked(schema: dict[str, Any] | str, param: str) -> dict[str, Any]:
    """Return the schema as a dict.

    Raises:
        InvalidRequest: the schema is too long or not a JSON object.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise InvalidRequest(
            f"{param} has {len(text)} characters, at most {MAX_SCHEMA_CHARACTERS} are allowed", param=param
        )
    if isinstance(schema, dict):
        return schema
    try:
        parsed = from_json(text)  # unlike json.loads, it limits the nesting depth, as the parser of the body does
    except ValueError as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param=param) from None
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"{param} must be a JSON object, or a string that contains one", param=param)
    return parsed
