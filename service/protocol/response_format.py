"""Request fields of structured output: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field
from pydantic_core import from_json

from service.protocol.errors import InvalidRequest
from service.protocol.request_model import RequestModel

MAX_SCHEMA_CHARACTERS = 256_000
# Any JSON object: a schema has no fixed set of keys to validate here.
Schema = Annotated[dict[str, Any], Field(description=f"a JSON Schema of up to {MAX_SCHEMA_CHARACTERS} characters")]
Word = Annotated[str, Field(min_length=1, max_length=1000)]
# chat: reasoning and tool calls, see `service.structured_output.chat_grammar`.
ConstraintKind: TypeAlias = Literal["json", "regex", "choice", "grammar", "chat"]


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """Output format that a completion must follow, from the request field `param`.

    lenient: ignore schema keywords that cannot be enforced, instead of rejecting the request.
    """

    kind: ConstraintKind
    content: Any
    param: str
    lenient: bool = False


class JsonSchemaFormat(RequestModel):
    """Field `response_format.json_schema`. The model sees neither `name` nor `description`."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: Annotated[bool, Field(description="if false, ignore keywords that cannot be enforced")] | None = True
    description: str | None = None


class ResponseFormat(RequestModel):
    """Field `response_format`: any text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def constraint(self) -> OutputConstraint | None:
        """Return the output constraint; None: any text. Raises InvalidRequest if `json_schema` does not fit `type`."""
        if (self.json_schema is None) is (self.type == "json_schema"):
            problem = "required" if self.json_schema is None else "not allowed"
            message = f"response_format: the field json_schema is {problem} with type {self.type}"
            raise InvalidRequest(message, param="response_format.json_schema")
        if self.type == "text":
            return None
        if self.json_schema is None:
            return OutputConstraint("json", {"type": "object"}, "response_format")
        param = "response_format.json_schema.schema"
        schema = _checked_schema(self.json_schema.schema_, param)
        return OutputConstraint("json", schema, param, lenient=self.json_schema.strict is False)


GuidedRegex = Annotated[str, Field(min_length=1, max_length=16_000)]
GuidedChoice = Annotated[list[Word], Field(min_length=1, max_length=1024, fail_fast=True)]
GuidedGrammar = Annotated[str, Field(min_length=1, max_length=64_000)]
# Older request fields of vLLM, each replaced by a field of `structured_outputs`, with their kinds of constraint.
GUIDED: dict[str, ConstraintKind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class StructuredOutputs(RequestModel):
    """Field `structured_outputs`: exactly one constraint. `grammar` is in Lark syntax or GBNF."""

    json_: Annotated[
        Schema | str | None, Field(alias="json", description="a JSON Schema, as an object or as a string of JSON")
    ] = None
    regex: GuidedRegex | None = None
    choice: GuidedChoice | None = None
    grammar: GuidedGrammar | None = None

    def constraint(self) -> OutputConstraint:
        """Return the output constraint. Raises InvalidRequest unless exactly one field is set, and for a bad schema."""
        given: dict[ConstraintKind, Any] = self.model_dump(by_alias=True, exclude_none=True)  # type: ignore[assignment]
        if len(given) != 1:
            raise InvalidRequest.of(
                "structured_outputs",
                f" takes exactly one of json, regex, choice and grammar, not {', '.join(given) or 'none'}",
            )
        ((kind, content),) = given.items()
        param = f"structured_outputs.{kind}"
        return OutputConstraint(kind, _checked_schema(content, param) if kind == "json" else content, param)


def guided_constraint(param: str, content: Any) -> OutputConstraint:
    """Return the output constraint of an older field of vLLM, `param`. Raises InvalidRequest for a bad schema."""
    kind = GUIDED[param]
    return OutputConstraint(kind, _checked_schema(content, param) if kind == "json" else content, param)


def _checked_schema(schema: dict[str, Any] | str, param: str) -> dict[str, Any]:
    """Return the JSON Schema in the field `param` as a dict. Raises InvalidRequest if it is not JSON or too long."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    if len(text) > MAX_SCHEMA_CHARACTERS:
        message = f"{param} has {len(text)} characters; shorten it to at most {MAX_SCHEMA_CHARACTERS}"
        raise InvalidRequest(message, param=param)
    if isinstance(schema, dict):
        return schema
    try:
        parsed = from_json(text)  # unlike json.loads, from_json limits the nesting depth
    except ValueError as error:
        raise InvalidRequest.of(param, f" is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest.of(param, " must be a JSON object, or a string that contains one")
    return parsed
