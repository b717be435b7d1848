"""Schemas and grammars that llguidance would enforce wrongly are rejected or narrowed."""

import math
from functools import cache
from typing import Any

import pytest
from llguidance import LLTokenizer

from model.structured_output.grammar import GrammarError, Vocabulary, compile_grammar
from service.structured_output.compiler_process import constraint_grammar, try_out
from tests.tiny_model import tiny_tokenizer

INTEGER = {"type": "integer"}
LARGEST = 2**53 - 1
BEYOND = "is beyond ±(2^53 - 1), where JSON numbers are no longer exact"


@cache
def vocabulary() -> tuple[Vocabulary, LLTokenizer]:
    made = Vocabulary.of(tiny_tokenizer())
    return made, made.for_masks()


def follows(kind: str, content: Any, text: str) -> bool:
    """Return True if the compiled constraint allows a text."""
    made, masks = vocabulary()
    matcher = compile_grammar(masks, constraint_grammar(kind, content))
    consumed = all(matcher.consume_token(token_id) for token_id in made(text.encode()))
    return consumed and (matcher.is_stopped() or matcher.is_accepting())


def complaint(kind: str, content: Any, *, lenient: bool = False) -> str:
    """Return the message with which a constraint is rejected."""
    with pytest.raises(GrammarError) as caught:
        try_out(vocabulary()[1], constraint_grammar(kind, content, lenient=lenient))
    return str(caught.value)


NAMED_AND_FREE = {
    "type": "object",
    "properties": {"a": INTEGER},
    "required": ["a"],
    "additionalProperties": {"type": "boolean"},
}
PATTERNS = {"type": "object", "patternProperties": {"^a$": INTEGER}, "additionalProperties": {"type": "boolean"}}


@pytest.mark.parametrize(
    ("schema", "text", "may"),
    [
        (NAMED_AND_FREE, '{"a":1,"b":true}', True),
        (NAMED_AND_FREE, r'{"a":1,"\"\\\n":true}', True),
        (NAMED_AND_FREE, '{"a":1,"a":true}', False),
        (NAMED_AND_FREE, r'{"a":1,"\u0061":true}', False),
        (PATTERNS, '{"a":1,"b":true}', True),
        (PATTERNS, '{"a":true}', False),
        (PATTERNS, r'{"\u0061":true}', False),
        ({"const": {"é\t": "é\t"}}, '{"é\\t":"é\\t"}', True),
        ({"type": "object", "properties": {"\x01": INTEGER}, "required": ["\x01"]}, r'{"\u0001":1}', True),
    ],
)
def test_a_json_key_has_only_one_spelling(schema: Any, text: str, may: bool) -> None:
    """Another spelling of a named key would pass for an unnamed key, whose value may have another type."""
    assert follows("json", schema, text) is may


def test_min_properties_over_unnamed_keys_is_rejected() -> None:
    """A grammar cannot forbid that a key not named in the schema repeats, so two such keys may be the same key."""
    free = {"type": "object", "minProperties": 2, "additionalProperties": INTEGER}
    assert complaint("json", free).startswith(
        "minProperties: 2 with 0 required cannot be enforced, because keys that are not named"
    )
    assert complaint("json", {"properties": {"b": free}}).startswith("at properties.b: minProperties: 2 with 0 req")
    patterns = {**free, "additionalProperties": False, "patternProperties": {"^x": INTEGER}}
    assert "cannot be enforced" in complaint("json", patterns)
    assert follows("json", {**free, "minProperties": 1}, '{"x":1}')
    assert not follows("json", {**free, "minProperties": 1}, "{}")
    one_more = {**free, "required": ["a"]}
    assert follows("json", one_more, '{"a":1,"x":1}')
    assert not follows("json", one_more, '{"a":1}')
    try_out(vocabulary()[1], constraint_grammar("json", free, lenient=True))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": LARGEST + 1}, f"at const: {LARGEST + 1} {BEYOND}"),
        ({"properties": {"a": {"enum": [1, {"b": [-(2**70)]}]}}}, f"at properties.a.enum[1].b[0]: -{2**70} {BEYOND}"),
        ({**INTEGER, "minimum": 2**64}, f"at minimum: {2**64} {BEYOND}"),
        ({"items": {**INTEGER, "exclusiveMaximum": -1e20}}, f"at items.exclusiveMaximum: -1e+20 {BEYOND}"),
        ({"type": "string", "maxLength": 2**70}, f"at maxLength: {2**70} {BEYOND}"),
        ({"x-mine": [2**70]}, f"{2**70} is too large a number"),
        ({"enum": ["a", math.nan]}, "at enum[1]: nan is not a JSON number"),
        ({"type": "number", "minimum": -math.inf}, "at minimum: -inf is not a JSON number"),
        ({"anyOf": [INTEGER, {"const": "a\x01"}]}, "at anyOf[1].const: a control character that needs a \\u escape"),
        ({"x-guidance": {"item_separator": "x"}}, "the keyword x-guidance is not supported"),
        ({"items": [INTEGER, {"x-guidance": {}}]}, "at items[1]: the keyword x-guidance is not supported"),
        ({"$ref": "#/mine/a", "mine": {"a": {"const": 2**60}}}, f"at mine.a.const: {2**60} {BEYOND}"),
        ({"$ref": "#"}, "no tokens of this model can complete the text"),
        ({"properties": {"a": {"oneOf": [INTEGER, {"type": "number"}]}}}, "oneOf with branches"),
    ],
)
def test_an_unenforceable_schema_is_rejected(schema: Any, message: str) -> None:
    assert complaint("json", schema).startswith(message)
    assert "coerce_one_of" not in complaint("json", schema)


def test_integers_are_limited_to_exact_doubles() -> None:
    """A bound beyond ±(2^53 - 1) is lowered to this range, so that no generated integer violates the schema."""
    for number in (LARGEST, -LARGEST, 0, 0.1, 1.5):
        assert follows("json", {"const": number}, str(number))
    for schema in (
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"exclusiveMinimum": -1e300, "exclusiveMaximum": 1e300},
    ):
        for sign in (1, -1):
            assert follows("json", {**INTEGER, **schema}, str(sign * LARGEST))
            assert not follows("json", {**INTEGER, **schema}, str(sign * (LARGEST + 1)))
    assert follows("json", {"type": "number", "maximum": 1e300}, "0.5")


def test_property_names_and_annotations_are_not_keywords() -> None:
    named = {"type": "object", "properties": {"x-guidance": INTEGER, "const": INTEGER}, "required": ["x-guidance"]}
    assert follows("json", named, '{"x-guidance":1,"const":2}')
    assert follows("json", {**INTEGER, "default": 2**70, "examples": [math.nan, 2**70]}, "12")


TOKENS = "a grammar rule refers to a token, as in <|end|>; describe the token's text instead"


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start: <[256]> "a"', TOKENS),
        ('start: "a"\n  | b\nb: <|im_end|>', TOKENS),
        ("start: <[*]>", TOKENS),
        ('start: "<[9]>" <[^1-5]>', TOKENS),
        ("start: start", "no tokens of this model can complete the text"),
        (
            'start: "a"\n  b\nb[temperature=0.5]: "c"',
            "line 3 of the grammar: a rule cannot set temperature; set it in the request",
        ),
        ('start: "a"\n  %json {"const": 1e20}', f"line 2 of the grammar: at const: 1e+20 {BEYOND}"),
        ('start: %json {"x-guidance": {}}', "line 1 of the grammar: the keyword x-guidance is not supported"),
        ("start: %json {", 'failed to parse "%json"'),
    ],
)
def test_an_unenforceable_grammar_is_rejected(grammar: str, message: str) -> None:
    assert complaint("grammar", grammar).startswith(message)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('start: "<[9]>" /<[0-9]>/ b // <[3]> temperature=1\nb: "<|im_end|>" # %json', "<[9]><7><|im_end|>"),
        ('start: temperature\ntemperature: "%json temperature=" "a"i', "%json temperature=A"),
        ('start: "say: " %json {"type": "array", "items": {"type": "integer", "maximum": 9}}', "say: [1, 2]"),
        ('start: %json true "x"', '[{"any": null}]x'),
        ('%llguidance {}\nstart: "a"', "a"),
        (r'root ::= "a\"<" [^"]* ">"', 'a"<b>'),
    ],
)
def test_strings_and_comments_that_look_like_rules_are_accepted(grammar: str, text: str) -> None:
    assert follows("grammar", grammar, text)


def test_a_schema_within_a_grammar_is_enforced_like_response_format() -> None:
    assert not follows(
        "grammar", 'start: "x" %json {"type": "array"}', "x[1,  2]"
    )  # JSON by a schema has at most one space


@pytest.mark.parametrize(("day", "may"), [("2023-02-28", True), ("2023-02-29", True), ("2023-02-30", False)])
def test_a_date_has_valid_months_and_ignores_leap_years(day: str, may: bool) -> None:
    """docs/structured.md documents that 29 February is accepted in every year."""
    assert follows("json", {"type": "string", "format": "date"}, f'"{day}"') is may
    assert follows("json", {"type": "string", "format": "date-time"}, f'"{day}T01:02:03Z"') is may
