"""Schemas of single arguments, for tool formats that write arguments one by one and not as one JSON object."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from model.chat.tool_formats.tool_format import ToolSchema
from model.structured_output.grammar import GrammarError

_ANNOTATIONS = {
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "default",
    "definitions",
    "deprecated",
    "description",
    "examples",
}
_ANNOTATIONS |= {"readOnly", "title", "writeOnly"}
_OBJECT = ("type", "properties", "required", "additionalProperties")
_MAX_REFERENCES = 100


@dataclass(frozen=True, slots=True)
class ArgumentSchemas:
    """Reader of the JSON Schemas of a tool's arguments.

    format_name: name of the tool format that is to enforce the schemas, for errors about what it cannot enforce.
    tool: tool whose `parameters` are the root that each `$ref` refers to.
    """

    format_name: str
    tool: ToolSchema

    def properties(self, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
        """Yield name, schema and "is required" of each property of an object, in the schema's order.

        Required properties that are not in `properties` come last, with the schema `additionalProperties`. Raises
        GrammarError, see `check_keywords`.
        """
        self.check_keywords(schema, *_OBJECT)
        named, required = self.read(schema, "properties", {}), self.read(schema, "required", [])
        for name, part in named.items():
            yield name, part, name in required
        for name in required:
            if name not in named:
                yield str(name), schema.get("additionalProperties", True), True

    def read(self, schema: Mapping[str, Any], key: str, default: Any) -> Any:
        """Return a schema keyword's value, else `default`. Raises GrammarError unless it has the default's type."""
        value = schema.get(key, default)
        if not isinstance(value, type(default)):
            raise GrammarError(f"{key} has the wrong type {type(value).__name__}; see the JSON Schema specification")
        return value

    def check_keywords(self, schema: Mapping[str, Any], *known: str) -> None:
        """Raise GrammarError for a keyword that constrains values and is not in `known`, if the tool is strict."""
        if self.tool.lenient:
            return
        if found := next((key for key in schema if key not in known and key not in _ANNOTATIONS), None):
            raise self.error(f"the keyword {found!r} here", "remove the keyword")

    def resolve(self, schema: Any) -> Any:
        """Return a JSON Schema with the `$ref` at its top replaced by the schema that it refers to.

        Other keywords beside the `$ref` stay. Raises GrammarError for a reference to no schema, or to itself.
        """
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            target: Any = self.tool.parameters
            for key in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
                target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
            if not isinstance(target, Mapping):
                raise GrammarError(f"the reference {schema['$ref']!r} leads to no schema; correct the reference")
            schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
        raise self.error("a reference to itself", "remove the reference")

    def standalone(self, schema: Any) -> dict[str, Any]:
        """Return a schema with the `$defs` and `definitions` of the tool's parameters, which its references need.

        The schema `true` becomes {}, and `false` becomes a schema that no value fits.
        """
        if not isinstance(schema, Mapping):
            return {} if schema else {"not": {}}
        definitions = {
            key: self.tool.parameters[key] for key in ("$defs", "definitions") if key in self.tool.parameters
        }
        return {**definitions, **schema}

    def error(self, fact: str, remedy: str) -> GrammarError:
        """Return a one-line GrammarError: the tool format cannot enforce `fact`, and the remedy."""
        return GrammarError(f"{fact} cannot be enforced in the {self.format_name} format; {remedy}")
