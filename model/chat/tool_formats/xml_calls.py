"""Tool formats that write each argument in tags of its own: strings as they are, other values in JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from llguidance import regex_to_lark

from model.chat.tool_formats.argument_schema import ArgumentSchemas
from model.chat.tool_formats.tool_format import (
    CallParser,
    Part,
    PartKind,
    SteppedCallParser,
    ToolFormat,
    ToolSchema,
    safe_length,
)
from model.structured_output.lark_document import ANY_TEXT, LarkDocument, escape

_BOOLEANS = {"True": "true", "False": "false"}


class _Kind(Enum):
    """Spelling of an argument's value. NULLABLE: a string as it is, or `null`, which always means null."""

    STRING = auto()
    NULLABLE = auto()
    JSON = auto()


@dataclass(frozen=True, kw_only=True)
class XmlCalls(ToolFormat):
    """Tool format whose call is `before_name`, the name, `after_name`, the arguments and `after_arguments`.

    Arguments are in the schema's order. Each is `before_key`, its name, `after_key`, its value and `after_value`.
    """

    before_name: str
    after_name: str
    before_key: str
    after_key: str
    after_value: str
    after_arguments: str

    def call(self, tool: ToolSchema, document: LarkDocument) -> str:
        schemas = ArgumentSchemas(self.name, tool)
        arguments = []
        for name, schema, is_required in schemas.properties(tool.parameters):
            if not name or self.after_key[0] in name or "\n" in name:
                raise schemas.error(f"the property {name!r}", "rename it")
            key = f"{document.literal(self.before_key)} {document.plain(name)} {document.literal(self.after_key)}"
            argument = document.rule(f"{key} {self._value(schema, schemas, document)}")
            arguments.append(argument if is_required else f"({argument})?")
        head = document.literal(f"{self.before_name}{tool.name}{self.after_name}")
        return f"{head} {' '.join(arguments)} {document.literal(self.after_arguments)}"

    def _value(self, schema: Any, schemas: ArgumentSchemas, document: LarkDocument) -> str:
        """Return a Lark expression for an argument's value that the schema permits, and `after_value` after it."""
        kind, string = _kind(schema, schemas)
        if kind is not _Kind.JSON:
            return self._string(string, schemas, document, is_nullable=kind is _Kind.NULLABLE)
        value = document.json(schemas.standalone(schema), lenient=schemas.tool.lenient)
        resolved = schemas.resolve(schema)
        if isinstance(resolved, Mapping) and resolved.get("type") == "boolean" and "enum" not in resolved:
            value = f'({value} | "True" | "False")'  # templates in Jinja write booleans as Python does
        return f"{value} {document.literal(self.after_value)}"

    def _string(
        self, schema: Mapping[str, Any], schemas: ArgumentSchemas, document: LarkDocument, *, is_nullable: bool
    ) -> str:
        """Return a Lark expression for a string that the schema permits, without quotes, and `after_value` after it.

        is_nullable: the value may also be `null`.
        """
        schemas.check_keywords(schema, "type", "enum", "const", "minLength", "maxLength", "pattern")
        least = schemas.read(schema, "minLength", 0)
        most = schemas.read(schema, "maxLength", 0) if "maxLength" in schema else None
        regex = _string_regex(schema, schemas, self.after_value)
        if not is_nullable or (not regex and least <= len("null") and (most is None or most >= len("null"))):
            return document.until(self.after_value, regex=regex, min_length=least, max_length=most)
        lengths = rf"/(.|\n){{{least},{'' if most is None else most}}}/"
        return document.until(self.after_value, regex=f"/null/ | (({regex or ANY_TEXT}) & {lengths})")

    def parser(self, tools: Sequence[ToolSchema]) -> CallParser:
        kinds = {}
        for tool in tools:
            schemas = ArgumentSchemas(self.name, tool)
            kinds[tool.name] = {name: _kind(part, schemas)[0] for name, part, _ in schemas.properties(tool.parameters)}
        return _XmlCallParser(self, kinds)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        written = [
            f"{self.before_key}{key}{self.after_key}"
            f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}{self.after_value}"
            for key, value in arguments.items()
        ]
        return f"{self.before_name}{name}{self.after_name}{''.join(written)}{self.after_arguments}"


def _kind(schema: Any, schemas: ArgumentSchemas) -> tuple[_Kind, Mapping[str, Any]]:
    """Return the spelling of an argument with this schema, and the schema of its string values; empty for kind JSON."""
    schema = schemas.resolve(schema)
    if not isinstance(schema, Mapping):
        return _Kind.JSON, {}
    if isinstance(schema.get("anyOf"), list):
        branches = [branch for branch in map(schemas.resolve, schema["anyOf"]) if branch != {"type": "null"}]
        if len(branches) == 1 and len(schema["anyOf"]) == 2 and _kind(branches[0], schemas)[0] is _Kind.STRING:
            return _Kind.NULLABLE, branches[0]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if schema.get("type") == "string" or ("type" not in schema and _are_strings(values)):
        return _Kind.STRING, schema
    if schema.get("type") in (["string", "null"], ["null", "string"]) and (values is None or _are_strings(values)):
        return _Kind.NULLABLE, schema
    return _Kind.JSON, {}


def _are_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _string_regex(schema: Mapping[str, Any], schemas: ArgumentSchemas, end: str) -> str:
    """Return a regular expression for the strings that a schema permits, as for `LarkDocument.terminal`.

    Several are joined by `&`; empty: any string. minLength and maxLength are not checked here. Raises GrammarError if a
    permitted value contains `end`, the text after the value.
    """
    regexes = []
    if "enum" in schema or "const" in schema:
        values = [value for value in schemas.read(schema, "enum", [schema.get("const")]) if isinstance(value, str)]
        if found := next((value for value in values if (value + end).find(end) < len(value)), None):
            raise schemas.error(f"the value {found!r}, which contains {end!r},", "remove the value")
        regexes = [f"/({'|'.join(map(escape, values))})/"]  # // would be a comment
    if "pattern" in schema:
        regexes.append(_pattern_regex(schemas.read(schema, "pattern", "")))
    return " & ".join(regexes)


def _pattern_regex(pattern: str) -> str:
    """Return a regular expression that matches a whole text in which a JSON Schema's pattern is found."""
    is_anchored = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = pattern[is_anchored[0] : len(pattern) - is_anchored[1]]
    inner = regex_to_lark(inner, "d").replace("\n", r"\n")  # "d": \d is an ASCII digit, as in JavaScript
    before, after = (r"" if anchored else r"(.|\n)*" for anchored in is_anchored)
    return f"/{before}({inner}){after}/"


class _XmlCallParser(SteppedCallParser):
    def __init__(self, form: XmlCalls, kinds: Mapping[str, Mapping[str, _Kind]]) -> None:
        super().__init__()
        self._form = form
        self._kinds = kinds
        self._before_name = form.before_name
        self._tool = ""
        self._kind = _Kind.JSON  # of the current value
        self._has_arguments = self._has_begun = False  # begun: part of the value has been returned

    def passes(self, text: str) -> bool:
        if self._step != self._pass_value or not self._has_begun or self._held or self._form.after_value[0] in text:
            return False
        # The only printable characters that JSON escapes are these two.
        return self._kind is _Kind.JSON or (text.isprintable() and '"' not in text and "\\" not in text)

    def _between(self, before: str, after: str) -> str | None:
        """Return the text between `before` and `after`, if the held text begins with `before`. Remove all three.

        None: the held text does not begin with `before`, or does not contain `after` yet.
        """
        end = self._held.find(after, len(before)) if self._held.startswith(before) else -1
        if end < 0:
            return None
        found, self._held = self._held[len(before) : end], self._held[end + len(after) :]
        return found

    def _begin_call(self, parts: list[Part]) -> bool:
        name = self._between(self._before_name, self._form.after_name)
        if name is None:
            return False
        parts.append(Part(PartKind.CALL, name))
        self._tool, self._step, self._has_arguments = name, self._begin_argument, False
        self._before_name = self._form.separator + self._form.before_name
        return True

    def _begin_argument(self, parts: list[Part]) -> bool:
        if self._held.startswith(self._form.after_arguments):
            parts.append(Part(PartKind.ARGUMENTS, "}" if self._has_arguments else "{}"))
            self._held, self._step = self._held[len(self._form.after_arguments) :], self._begin_call
            return True
        key = self._between(self._form.before_key, self._form.after_key)
        if key is None:
            return False
        separator = ", " if self._has_arguments else "{"
        parts.append(Part(PartKind.ARGUMENTS, f"{separator}{json.dumps(key, ensure_ascii=False)}: "))
        self._step, self._has_arguments, self._has_begun = self._pass_value, True, False
        self._kind = self._kinds.get(self._tool, {}).get(key, _Kind.JSON)
        return True

    def _pass_value(self, parts: list[Part]) -> bool:
        after = self._form.after_value
        end = self._held.find(after)
        passed = self._held[: end if end >= 0 else safe_length(self._held, after)]
        is_whole = end >= 0 and not self._has_begun
        specials = {"null": "null"} if self._kind is _Kind.NULLABLE else _BOOLEANS if self._kind is _Kind.JSON else {}
        if is_whole and passed in specials:
            parts.append(Part(PartKind.ARGUMENTS, specials[passed]))
        elif end >= 0 or self._has_begun or not any(special.startswith(passed) for special in specials):
            self._pass_piece(passed, parts, is_last=end >= 0)
        else:
            return False
        if end >= 0:
            self._held, self._step = self._held[end + len(after) :], self._begin_argument
            return True
        self._held = self._held[len(passed) :]
        return False

    def _pass_piece(self, text: str, parts: list[Part], *, is_last: bool) -> None:
        """Add a piece of a value other than `null` and the booleans to `parts`, as JSON text."""
        if self._kind is not _Kind.JSON:
            begun, end = "" if self._has_begun else '"', '"' if is_last else ""
            text = f"{begun}{json.dumps(text, ensure_ascii=False)[1:-1]}{end}"
        self._has_begun = True
        if text:
            parts.append(Part(PartKind.ARGUMENTS, text))
