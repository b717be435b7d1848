"""Random tools and arguments, grammars over a tokenizer of bytes and marks, and calls as parsed from text."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from model.chat.reasoning import all_marks, mark_ids
from model.chat.tool_formats.tool_format import Part, PartKind, ToolFormat, ToolSchema
from model.structured_output.grammar import Vocabulary, compile_grammar
from model.structured_output.lark_document import LarkDocument
from model.tokenizer.byte_level import ByteLevelTokenizer

EOS = "<|endoftext|>"
Calls = list[tuple[str, Any]]


@dataclass(frozen=True)
class Bytes:
    """Tokenizer of bytes, with or without marks as single tokens, in the forms that tests need."""

    tokenizer: ByteLevelTokenizer
    masks: LLTokenizer
    mark_ids: Mapping[str, int]

    def matcher(
        self, form: ToolFormat, tools: Sequence[ToolSchema], *, parallel: bool = True, auto: bool = False
    ) -> Any:
        """Return a matcher of the calls of tools, or with `auto` of text or calls."""
        document = LarkDocument(self.mark_ids)
        calls = form.calls(tools, document, is_parallel=parallel)
        start = form.auto(document, calls) if auto else f"{document.literal(form.opening)} {calls}"
        return compile_grammar(self.masks, document.grammar(start))

    def rejected(self, matcher: LLMatcher, text: str) -> str | None:
        """Return the part of a text before the token that the grammar rejects; None: it accepts the whole text."""
        token_ids = self.tokenizer.encode(text, parse_special=True)
        for position, token_id in enumerate(token_ids):
            if not matcher.consume_token(token_id):
                return self.tokenizer.decode(token_ids[:position])
        return None if matcher.is_accepting() else text

    def walk(self, matcher: LLMatcher, chance: random.Random, *, max_tokens: int = 3000) -> str | None:
        """Return the text of random tokens that the grammar allows; None if it does not end."""
        token_ids: list[int] = []
        while len(token_ids) < max_tokens:
            allowed = [token_id for token_id, bias in enumerate(matcher.compute_logit_bias()) if bias]
            if self.tokenizer.eos_token_ids[0] in allowed and (len(allowed) == 1 or chance.random() < 0.5):
                return self.tokenizer.decode(token_ids)
            # Structure is rare among all bytes, so strings would be long.
            structure = [token_id for token_id in allowed if token_id < 128 and chr(token_id) in '"]}),']
            token_ids.append(chance.choice(structure if structure and chance.random() < 0.3 else allowed))
            assert matcher.consume_token(token_ids[-1])
        return None


@cache
def byte_tokens(*, has_marks: bool) -> Bytes:
    names = [EOS, *(all_marks() if has_marks else ())]
    tokenizer = ByteLevelTokenizer(
        pattern=r"(?s:.)",
        ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={name: 256 + number for number, name in enumerate(names)},
        eos_token_ids=(256,),
        bos_token_id=None,
    )
    ids = mark_ids(tokenizer, all_marks())
    return Bytes(tokenizer, Vocabulary.of(tokenizer, ids.values()).for_masks(), ids)


def written(form: ToolFormat, calls: Iterable[tuple[str, Any]]) -> str:
    """Return the text of calls after the opening."""
    return form.separator.join(form.write_call(name, arguments) for name, arguments in calls) + form.closing


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return parts with neighbours of a kind joined, except the beginnings of calls."""
    found: list[Part] = []
    for part in parts:
        if found and found[-1].kind is part.kind is not PartKind.CALL:
            found[-1] = Part(part.kind, found[-1].text + part.text)
        else:
            found.append(part)
    return found


def calls_of(parts: Iterable[Part]) -> Calls:
    """Return the names and arguments of complete calls."""
    found = joined(part for part in parts if part.kind in (PartKind.CALL, PartKind.ARGUMENTS))
    assert [part.kind for part in found] == [PartKind.CALL, PartKind.ARGUMENTS] * (len(found) // 2)
    return [(name.text, json.loads(arguments.text)) for name, arguments in zip(found[::2], found[1::2], strict=True)]


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    """Return a text cut at some positions."""
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(bounds)]


CUTS = st.lists(st.integers(0, 5000), max_size=20)
_TEXT = st.text(st.sampled_from("ab \n\t\"'\\</>[]{}()=,;:-é😀‰TF"), max_size=8)
_NAMES = st.lists(st.sampled_from(("city", "n", "is_on", "x2", "True", "é", "_")), max_size=4, unique=True)
_SCALARS: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 8},
    {"type": "integer", "minimum": -1000, "maximum": 1000},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", "dark blue", 'a"b']},
    {"type": "string", "enum": ["null", "None"]},
    {"const": 7},
    {"enum": [True, None, 3, {"a": [1, "x", False]}]},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]},
    {"type": ["string", "null"], "maxLength": 5},
]


def _object(parts: Mapping[str, Any], required: Iterable[str]) -> dict[str, Any]:
    names = [name for name in parts if name in required]
    return {"type": "object", "properties": dict(parts), "required": names, "additionalProperties": False}


@st.composite
def _objects(draw: st.DrawFn, schemas: st.SearchStrategy[Any]) -> dict[str, Any]:
    parts = {name: draw(schemas) for name in draw(_NAMES)}
    return _object(parts, draw(st.sets(st.sampled_from(sorted(parts)))) if parts else ())


_SCHEMAS = st.recursive(
    st.sampled_from(_SCALARS),
    lambda parts: st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, parts, st.integers(0, 2)),
        _objects(parts),
        parts.map(lambda items: {"anyOf": [{"type": "array", "items": items, "maxItems": 1}, {"type": "null"}]}),
    ),
    max_leaves=4,
)


@st.composite
def tool_lists(draw: st.DrawFn) -> list[ToolSchema]:
    """Return one to three tools, whose values are of limited length."""
    names = draw(st.lists(st.sampled_from(("f", "get_weather", "a-b", "g1")), min_size=1, max_size=3, unique=True))
    return [ToolSchema(name=name, parameters=draw(_objects(_SCHEMAS)), lenient=False) for name in names]


def values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy of the values that a schema of `tool_lists` allows."""
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return st.one_of([values(part) for part in schema["anyOf"]])
    if isinstance(schema["type"], list):
        return st.one_of([values({**schema, "type": kind}) for kind in schema["type"]])
    match schema["type"]:
        case "string":
            return _TEXT.map(lambda text: text[: schema["maxLength"]])
        case "integer":
            return st.integers(schema["minimum"], schema["maximum"])
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(values(schema["items"]), max_size=schema["maxItems"])
    parts = schema["properties"]
    optional = {name: values(part) for name, part in parts.items() if name not in schema["required"]}
    required = {name: values(parts[name]) for name in schema["required"]}
    found = st.fixed_dictionaries(required, optional=optional)
    return found.map(lambda value: {name: value[name] for name in parts if name in value})


@st.composite
def tools_and_calls(draw: st.DrawFn) -> tuple[list[ToolSchema], Calls]:
    """Return tools, and one to three valid calls."""
    tools = draw(tool_lists())
    called = draw(st.lists(st.sampled_from(tools), min_size=1, max_size=3))
    return tools, [(tool.name, draw(values(tool.parameters))) for tool in called]
