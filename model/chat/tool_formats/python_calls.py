"""Tool format that writes calls as a list of Python function calls: `[f(a=1, b="x"), g()]`."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from model.chat.tool_formats.argument_schema import ArgumentSchemas
from model.chat.tool_formats.tool_format import CallParser, Part, PartKind, SteppedCallParser, ToolFormat, ToolSchema
from model.structured_output.lark_document import LarkDocument

# Strings have the escapes that JSON and Python share: see `model.structured_output.grammar`.
_STRING = r'/"([^"\\\x00-\x1f\x7f]|\\["\\nrbtf])*"/'
_ANY_VALUE = rf"""start: value
value: {_STRING} | /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/ | "True" | "False" | "None" | list | dict
list: "[" (value (", " value)*)? "]"
dict: "{{" (pair (", " pair)*)? "}}"
pair: {_STRING} ": " value
"""
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
_OUTSIDE_STRING = re.compile(r'["\[\]{}(),]|[A-Za-z]+')
_INSIDE_STRING = re.compile(r'["\\]')


@dataclass(frozen=True, kw_only=True)
class PythonCalls(ToolFormat):
    """Tool format whose call is a Python function call with keyword arguments, in the order of the schema."""

    separator: str = ", "

    def call(self, tool: ToolSchema, document: LarkDocument) -> str:
        literals = _Literals(document, ArgumentSchemas(self.name, tool))
        try:
            arguments = literals.pairs(tool.parameters, is_call=True)
        except RecursionError:
            raise literals.schemas.error("a schema with this number of levels", "use fewer levels") from None
        return f'{document.literal(f"{tool.name}(")} {arguments} ")"'

    def parser(self, tools: Sequence[ToolSchema]) -> CallParser:
        return _PythonCallParser()

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"


def _python(value: Any) -> str:
    """Return the Python literal of a JSON value."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_python(key)}: {_python(part)}' for key, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_python, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


@dataclass(slots=True)
class _Literals:
    """Lark expressions of the Python literals that JSON Schemas allow."""

    document: LarkDocument
    schemas: ArgumentSchemas
    _known: dict[str, str | None] = field(default_factory=dict)  # by reference; None: the reference is in progress

    def value(self, schema: Any) -> str:
        """Return the Lark expression of a schema's values. Raises GrammarError if the schema cannot be enforced."""
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return self._value(schema)
        self.schemas.check_keywords(schema, "$ref")
        reference = str(schema["$ref"])
        if reference not in self._known:
            self._known[reference] = None
            self._known[reference] = self.document.rule(self._value(self.schemas.resolve(schema)))
        return self._known[reference] or self._any_value(
            f"the recursive schema {reference!r}", "describe a fixed number of levels"
        )

    def _value(self, schema: Any) -> str:
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise self.schemas.error(f"the schema {str(schema)[:50]}", "replace it with an object")
        kind, choices = schema.get("type"), "anyOf" if "anyOf" in schema else "oneOf"
        if "enum" in schema or "const" in schema:
            self.schemas.check_keywords(schema, "type", "enum", "const")
            return self._one_of(map(self._exactly, self.schemas.read(schema, "enum", [schema.get("const")])))
        if "anyOf" in schema or ("oneOf" in schema and self.schemas.tool.lenient):
            self.schemas.check_keywords(schema, choices)
            return self._one_of(map(self.value, self.schemas.read(schema, choices, [])))
        if isinstance(kind, list):
            return self._one_of(self._value({**schema, "type": each}) for each in kind)
        match kind:
            case "boolean":
                self.schemas.check_keywords(schema, "type")
                return '("True" | "False")'
            case "null":
                return '"None"'
            case "string" | "integer" | "number":
                return self.document.json(schema, lenient=self.schemas.tool.lenient)
            case "array":
                return self._list(schema)
            case "object":
                return self._dict(schema)
            case None:
                self.schemas.check_keywords(schema)
                return self._any_value()
        raise self.schemas.error(f"the type {str(kind)[:50]!r}", "replace it with a type of JSON Schema")

    def _any_value(self, fact: str = "", remedy: str = "") -> str:
        """Return the Lark expression of any value, for a schema that has no keywords or cannot be enforced.

        fact: reason why the schema cannot be enforced. Raises GrammarError with it, unless the tool is not strict.
        """
        if fact and not self.schemas.tool.lenient:
            raise self.schemas.error(fact, remedy)
        return self.document.nested(json.dumps({"grammars": [{"lark_grammar": _ANY_VALUE}]}))

    def _one_of(self, expressions: Iterable[str]) -> str:
        if not (joined := " | ".join(expressions)):
            raise self.schemas.error("a schema without values", "add a value")
        return f"({joined})"

    def _exactly(self, value: Any) -> str:
        return self.document.plain(_python(value))

    def _list(self, schema: Mapping[str, Any]) -> str:
        self.schemas.check_keywords(schema, "type", "items", "minItems", "maxItems")
        item = self.document.rule(self.value(schema.get("items", True)))
        least, most = self.schemas.read(schema, "minItems", 0), self.schemas.read(schema, "maxItems", 2**31)
        if most == 0:
            return '"[]"'
        more = f"{max(least - 1, 0)},{most - 1 if 'maxItems' in schema else ''}"
        items = item if most == 1 else f'{item} (", " {item}){{{more}}}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _dict(self, schema: Mapping[str, Any]) -> str:
        if schema.get("properties") or schema.get("required"):
            return f'"{{" {self.pairs(schema, is_call=False)} "}}"'
        free = schema.get("additionalProperties", True)
        self.schemas.check_keywords(schema, "type", "properties", "required", "additionalProperties")
        if free is False:
            return '"{}"'
        key = self.document.json({"type": "string"}, lenient=False)
        pair = self.document.rule(f'{key} ": " {self.value(free)}')
        return f'"{{" ({pair} (", " {pair})*)? "}}"'

    def pairs(self, schema: Mapping[str, Any], *, is_call: bool) -> str:
        """Return the Lark expression of an object schema's pairs: in a call `key=value`, else `key: value`."""
        # Built from the last pair to the first. Both are the remaining pairs: `after` with a comma before each pair,
        # `first` without the first comma.
        after, first = '""', '""'
        for name, part, is_required in reversed(list(self.schemas.properties(schema))):
            if is_call and not name.isidentifier():
                raise self.schemas.error(f"the property {name!r}", "rename it to a Python identifier")
            key = self.document.plain(f"{name}=" if is_call else f"{_python(name)}: ")
            pair = self.document.rule(f"{key} {self.value(part)}")
            first = self.document.rule(f"{pair} {after}" + ("" if is_required else f" | {first}"))
            after = self.document.rule(f'", " {pair} {after}' + ("" if is_required else f" | {after}"))
        return first


class _PythonCallParser(SteppedCallParser):
    def __init__(self) -> None:
        super().__init__()
        self._depth = 0  # brackets around the current position in a value
        self._has_arguments = False

    def passes(self, text: str) -> bool:
        return self._step == self._pass_string and not self._held and '"' not in text and "\\" not in text

    def _begin_call(self, parts: list[Part]) -> bool:
        end = self._held.find("(")
        if end < 0:
            return False
        parts.append(Part(PartKind.CALL, self._held[:end].lstrip(", ")))
        self._held, self._step, self._has_arguments = self._held[end + 1 :], self._begin_argument, False
        return True

    def _begin_argument(self, parts: list[Part]) -> bool:
        if self._held[0] == ")":
            parts.append(Part(PartKind.ARGUMENTS, "}" if self._has_arguments else "{}"))
            self._held, self._step = self._held[1:], self._begin_call
            return True
        end = self._held.find("=")
        if end < 0:
            return False
        key = json.dumps(self._held[:end].lstrip(" "), ensure_ascii=False)
        parts.append(Part(PartKind.ARGUMENTS, f"{', ' if self._has_arguments else '{'}{key}: "))
        self._held, self._step, self._has_arguments = self._held[end + 1 :], self._pass_value, True
        return True

    def _pass_value(self, parts: list[Part]) -> bool:
        """Convert held text outside strings to JSON, and move it to `parts`: up to the next string or the value's end.

        Return True if a string begins or the value has ended, False if more text is needed. A word at the end of the
        held text stays, because it may be incomplete.
        """
        passed, start = "", 0
        held = self._held
        while found := _OUTSIDE_STRING.search(held, start):
            passed += held[start : found.start()]
            start, token = found.end(), found[0]
            if token.isalpha():
                if start == len(held):  # the word may go on in the next text
                    start = found.start()
                    break
                passed += _JSON_WORDS.get(token, token)
            elif token in ",)" and self._depth == 0:
                self._step = self._begin_argument
                start -= token == ")"
                break
            else:
                self._depth += (token in "[{") - (token in "]}")
                passed += token
                if token == '"':
                    self._step = self._pass_string
                    break
        else:
            passed, start = passed + held[start:], len(held)
        if passed:
            parts.append(Part(PartKind.ARGUMENTS, passed))
        self._held = held[start:]
        return self._step != self._pass_value

    def _pass_string(self, parts: list[Part]) -> bool:
        """Add a piece of the arguments: text up to the end of the string. Return True if the string has ended.

        A backslash is held until the character after it.
        """
        held, start = self._held, 0
        while found := _INSIDE_STRING.search(held, start):
            if found[0] == '"':
                self._step, start = self._pass_value, found.end()
                break
            if found.end() == len(held):
                start = found.start()
                break
            start = found.end() + 1
        else:
            start = len(held)
        if start:
            parts.append(Part(PartKind.ARGUMENTS, held[:start]))
        self._held = held[start:]
        return self._step != self._pass_string
