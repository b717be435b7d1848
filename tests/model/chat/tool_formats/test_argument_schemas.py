"""Schemas in the formats that do not write JSON: enforced keywords, references, and clear errors for the rest."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jsonschema
import pytest

from model.chat.tool_formats.table import TOOL_FORMATS
from model.chat.tool_formats.tool_format import ToolSchema
from model.structured_output.grammar import GrammarError
from tests.model.chat.tool_formats.samples import byte_tokens, calls_of

XML, PYTHON = "qwen3_coder", "pythonic"
TOKENS = byte_tokens(has_marks=False)


def tool(schema: Any, more: Mapping[str, Any] = MappingProxyType({})) -> ToolSchema:
    """Return a tool with the parameter x."""
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], **more}
    return ToolSchema(name="f", parameters=parameters, lenient=False)


def spelled(name: str, value: str) -> str:
    """Return the text of a call f with the spelled value of x, after the opening."""
    if name == PYTHON:
        return f"f(x={value})]"
    return f"\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"


def value_of(name: str, checked: ToolSchema, value: str) -> Any:
    """Return the value of x that a format reads from a spelled value; the text "rejected" if the grammar rejects it."""
    form, text = TOOL_FORMATS[name], spelled(name, value)
    if TOKENS.rejected(TOKENS.matcher(form, [checked]), form.opening + text) is not None:
        return "rejected"
    ((_, arguments),) = calls_of(form.parser([checked]).push(text))
    return arguments["x"]


REFERENCES = {
    "$defs": {"color": {"enum": ["red", "blue"]}, "pair": {"type": "array", "items": {"$ref": "#/$defs/color"}}}
}
ENDING = "\n</parameter>\n"


@pytest.mark.parametrize(
    ("name", "schema", "value", "wanted"),
    [
        (XML, {"type": "string"}, 'a\n"b"\\', 'a\n"b"\\'),
        (XML, {"type": "string"}, "", ""),
        (XML, {"type": "string"}, "null", "null"),
        (XML, {"type": "string"}, f"a\n</parameter>{ENDING}", "rejected"),
        (XML, {"type": "string"}, "a\n</parameter> ", "a\n</parameter> "),
        (XML, {"type": "string", "maxLength": 3}, "a\nb", "a\nb"),
        (XML, {"type": "string", "maxLength": 3}, "abcd", "rejected"),
        (XML, {"type": "string", "minLength": 2}, "a", "rejected"),
        (XML, {"type": "string", "minLength": 3}, f"a{ENDING}", "rejected"),
        (XML, {"type": "string", "minLength": 2}, "a\n</parameter>", "rejected"),
        (XML, {"type": "string", "maxLength": 10**5}, "a" * 500, "a" * 500),
        (XML, {"type": "string", "minLength": 10, "maxLength": 10**5}, "a" * 500, "a" * 500),
        (XML, {"type": ["string", "null"], "maxLength": 3}, "null", None),
        (XML, {"type": ["string", "null"], "minLength": 5}, "null", None),
        (XML, {"type": ["string", "null"], "minLength": 5}, "nulll", "nulll"),
        (XML, {"type": ["string", "null"], "minLength": 5}, "nul", "rejected"),
        (XML, {"type": ["string", "null"], "pattern": "^[a-m]*$"}, "null", None),
        (XML, {"type": ["string", "null"], "maxLength": 10**5}, "a" * 500, "a" * 500),
        (XML, {"type": "string", "pattern": r"^a/\d+$"}, "a/12", "a/12"),
        (XML, {"type": "string", "pattern": r"^a/\d+$"}, "a/12b", "rejected"),
        (XML, {"type": "string", "pattern": r"^\d$"}, "٣", "rejected"),
        (XML, {"type": "string", "pattern": "b+"}, "abc", "abc"),
        (XML, {"type": "string", "pattern": "b+"}, "ac", "rejected"),
        (XML, {"type": "string", "pattern": r"a\$"}, "a$ b", "a$ b"),
        (XML, {"type": "string", "pattern": "^a$|^b$"}, "b", "b"),
        (XML, {"type": "string", "pattern": "^a$|^b$"}, "ab", "rejected"),
        (XML, {"type": "string", "pattern": "b", "maxLength": 2}, "abc", "rejected"),
        (XML, {"enum": ["a.b", "c\nd"]}, "c\nd", "c\nd"),
        (XML, {"enum": ["a.b", "c\nd"]}, "axb", "rejected"),
        (XML, {"type": "string", "const": "a*"}, "a*", "a*"),
        (XML, {"type": ["string", "null"]}, "null", None),
        (XML, {"type": ["string", "null"]}, "nullable", "nullable"),
        (XML, {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, "null", None),
        (XML, {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, "nul", "rejected"),
        (XML, {"anyOf": [{"type": "string"}, {"type": "integer"}]}, '"a"', "a"),
        (XML, {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1", 1),
        (XML, {"type": "boolean"}, "True", True),
        (XML, {"type": "boolean"}, "false", False),
        (XML, {"type": "number"}, "-1.5e3", -1500.0),
        (XML, {"$ref": "#/$defs/color"}, "red", "red"),
        (XML, {"$ref": "#/$defs/pair"}, '["red"]', ["red"]),
        (XML, {"$ref": "#/$defs/pair"}, '["green"]', "rejected"),
        (XML, {}, '"a"', "a"),
        (PYTHON, {"$ref": "#/$defs/pair"}, '["red", "blue"]', ["red", "blue"]),
        (PYTHON, {"$ref": "#/$defs/pair"}, '["green"]', "rejected"),
        (PYTHON, {"type": "string", "pattern": "^a+$"}, '"aa"', "aa"),
        (PYTHON, {"type": "string", "pattern": "^a+$"}, '"b"', "rejected"),
        (PYTHON, {"type": "string"}, "'a'", "rejected"),
        (PYTHON, {"type": "string"}, r'"True, \"x\\\n)"', 'True, "x\\\n)'),
        (PYTHON, {"type": "boolean"}, "true", "rejected"),
        (PYTHON, {"type": "array", "items": {"type": "boolean"}, "minItems": 2}, "[True]", "rejected"),
        (PYTHON, {"type": "array", "items": {"type": "boolean"}, "minItems": 2}, "[True, False]", [True, False]),
        (PYTHON, {"type": "array", "maxItems": 0}, "[]", []),
        (PYTHON, {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 1}, "[None]", [None]),
        (PYTHON, {}, '{"a": [1, True, None, -2.5e-3], "b": {}}', {"a": [1, True, None, -0.0025], "b": {}}),
        (PYTHON, True, '"a"', "a"),
        (PYTHON, {"type": "object"}, '{"a": None}', {"a": None}),
        (PYTHON, {"type": "object", "additionalProperties": {"type": "integer"}}, '{"a": 1, "b": 2}', {"a": 1, "b": 2}),
        (PYTHON, {"type": "object", "additionalProperties": {"type": "integer"}}, '{"a": "b"}', "rejected"),
        (PYTHON, {"type": "object", "additionalProperties": False}, "{}", {}),
        (PYTHON, {"type": "object", "required": ["a"], "additionalProperties": {"const": 1}}, '{"a": 1}', {"a": 1}),
        (PYTHON, {"type": "integer", "minimum": 3, "description": "d"}, "2", "rejected"),
        (PYTHON, {"const": {"a": [True, "True"]}}, '{"a": [True, "True"]}', {"a": [True, "True"]}),
    ],
)
def test_values_are_enforced_and_read(name: str, schema: Any, value: str, wanted: Any) -> None:
    checked = tool(schema, REFERENCES)
    found = value_of(name, checked, value)
    assert found == wanted
    assert type(found) is type(wanted)
    if wanted != "rejected":
        jsonschema.validate({"x": found}, checked.parameters)


@pytest.mark.parametrize("name", [XML, PYTHON])
def test_optional_arguments_keep_the_order_of_the_schema(name: str) -> None:
    parts = {key: {"type": "integer"} for key in "abc"}
    checked = ToolSchema(name="f", parameters={"type": "object", "properties": parts, "required": ["b"]}, lenient=False)
    form = TOOL_FORMATS[name]

    def accepted(keys: str) -> bool:
        text = form.opening + form.write_call("f", dict.fromkeys(keys, 1)) + form.closing
        return TOKENS.rejected(TOKENS.matcher(form, [checked]), text) is None

    assert [keys for keys in ("b", "ab", "bc", "abc", "", "a", "ba", "cb") if accepted(keys)] == [
        "b",
        "ab",
        "bc",
        "abc",
    ]


RECURSIVE = {"$defs": {"tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}}}


@pytest.mark.parametrize(
    ("name", "checked", "message", "is_lenient"),
    [
        (XML, tool({"type": "string", "format": "date"}), "the keyword 'format' here cannot be enforced", True),
        (XML, tool({"type": "string", "pattern": "(?=a)b"}), "look-around", False),
        (XML, tool({"type": "string", "pattern": "x^a"}), "lookarounds not supported", False),
        (XML, tool({"type": "string", "maxLength": "3"}), "maxLength has the wrong type str", False),
        (
            XML,
            tool({"type": "integer"}, {"minProperties": 1}),
            "the keyword 'minProperties' here cannot be enforced",
            True,
        ),
        (XML, tool({"$ref": "#/$defs/none"}), "'#/$defs/none' leads to no schema", False),
        (XML, tool({"$ref": "#/properties/x"}), "a reference to itself cannot be enforced", False),
        (XML, ToolSchema(name="f", parameters={"properties": {"a>b": {}}}, lenient=False), "the property 'a>b'", False),
        (
            PYTHON,
            ToolSchema(name="f", parameters={"properties": {"a-b": {}}}, lenient=False),
            "the property 'a-b'",
            False,
        ),
        (
            PYTHON,
            tool({"type": "array", "uniqueItems": True}),
            "'uniqueItems' here cannot be enforced in the pythonic",
            True,
        ),
        (PYTHON, tool({"oneOf": [{"type": "null"}, {"type": "boolean"}]}), "the keyword 'oneOf' here", True),
        (PYTHON, tool({"allOf": [{"type": "null"}]}), "the keyword 'allOf' here", True),
        (PYTHON, tool({"$ref": "#/$defs/tree"}, RECURSIVE), "the recursive schema '#/$defs/tree'", True),
        (PYTHON, tool({"$ref": "#/$defs/none"}), "'#/$defs/none' leads to no schema", False),
        (PYTHON, tool(False), "the schema False cannot be enforced", False),
        (PYTHON, tool({"type": "strin"}), "the type 'strin' cannot be enforced", False),
        (PYTHON, tool({"enum": []}), "a schema without values", False),
        (PYTHON, tool({"enum": 3}), "enum has the wrong type int", False),
        (PYTHON, tool({"type": "array", "minItems": "2"}), "minItems has the wrong type str", False),
        (PYTHON, tool({"type": "object", "properties": 3}), "properties has the wrong type int", False),
        (PYTHON, tool(json.loads('{"type":"array","items":' * 400 + "{}" + "}" * 400)), "number of levels", False),
        (PYTHON, tool({"type": "string", "pattern": "(?=a)b"}), "look-around", False),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_rejected_with_a_reason(
    name: str, checked: ToolSchema, message: str, is_lenient: bool
) -> None:
    form = TOOL_FORMATS[name]
    with pytest.raises(GrammarError) as caught:
        TOKENS.matcher(form, [checked])
    assert message in str(caught.value)
    lenient = ToolSchema(name="f", parameters=checked.parameters, lenient=True)
    if is_lenient:
        assert TOKENS.matcher(form, [lenient]) is not None
        assert form.parser([lenient]) is not None
    else:
        with pytest.raises(GrammarError):
            TOKENS.matcher(form, [lenient])
