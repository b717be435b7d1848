"""Output constraints of requests: parsing, rejection and bounded compile time."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any, Never

import pytest

from service.protocol.completions import CompletionRequest
from service.protocol.errors import EngineFailed, InvalidRequest, Overloaded
from service.protocol.response_format import MAX_SCHEMA_CHARACTERS, ConstraintKind, OutputConstraint
from service.sandbox.child_process import ProcessKilled, ProcessLimits
from service.structured_output.compiler import GrammarChecker
from tests.tiny_model import tiny_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def parse(**fields: Any) -> CompletionRequest:
    return CompletionRequest.parse(json.dumps({"prompt": "a", **fields}).encode())


def schema_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, **fields}}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OutputConstraint("json", {"type": "object"}, "response_format")),
        (
            {"response_format": schema_format(description="x", strict=True)},
            OutputConstraint("json", SCHEMA, "response_format.json_schema.schema"),
        ),
        (
            {"response_format": schema_format(strict=False)},
            OutputConstraint("json", SCHEMA, "response_format.json_schema.schema", lenient=True),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, OutputConstraint("json", SCHEMA, "structured_outputs.json")),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            OutputConstraint("json", SCHEMA, "structured_outputs.json"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, OutputConstraint("regex", "a+", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a"]}}, OutputConstraint("choice", ["a"], "structured_outputs.choice")),
        (
            {"structured_outputs": {"grammar": "root ::= [a]", "json": None}, "response_format": {"type": "text"}},
            OutputConstraint("grammar", "root ::= [a]", "structured_outputs.grammar"),
        ),
    ],
)
def test_request_fields_become_an_output_constraint(fields: dict[str, Any], wanted: OutputConstraint | None) -> None:
    assert parse(**fields).output_constraint == wanted


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be 'text', 'json_object' or"),
        ({"response_format": {}}, "response_format.type", "is required"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema is required"),
        (
            {"response_format": {**schema_format(), "type": "text"}},
            "response_format.json_schema",
            "not allowed with type text",
        ),
        ({"response_format": schema_format(name="a b")}, "response_format.json_schema.name", "must match"),
        ({"response_format": schema_format(schema="{}")}, "response_format.json_schema.schema", "an object"),
        ({"response_format": schema_format(stricter=1)}, "response_format.json_schema.stricter", "unknown field"),
        ({"response_format": schema_format(strict=1)}, "response_format.json_schema.strict", "true or false"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, regex, choice and grammar, not none"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "not json, regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "must be a JSON object"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json", "not valid JSON: recursion limit"),
        (
            {"structured_outputs": {"json": {"enum": ["x" * MAX_SCHEMA_CHARACTERS]}}},
            "structured_outputs.json",
            f"shorten it to at most {MAX_SCHEMA_CHARACTERS}",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must not be empty"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice", "must not be empty"),
        ({"structured_outputs": {"regex": "a" * 16_001}}, "structured_outputs.regex", "at most 16000"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", "unknown field"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "give only one of response_format and structured_outputs",
        ),
    ],
)
def test_an_invalid_output_constraint_names_the_field(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert message in caught.value.message


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(tiny_tokenizer(), ProcessLimits(cpu_seconds=1.0, memory_bytes=2**30))
    yield checker
    checker.close()


REJECTED = "field: this output format cannot be enforced: "


def checked(checker: GrammarChecker, kind: ConstraintKind, content: Any, *, lenient: bool = False) -> str | None:
    return asyncio.run(checker.grammar(OutputConstraint(kind, content, "field", lenient)))


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("json", {"type": "objekt"}, f"{REJECTED}Invalid type: objekt"),
        (
            "json",
            {"properties": {"a": {"anyOf": [{"type": "null"}, {"items": {"type": "strin"}}]}}},
            f"{REJECTED}Invalid type: strin",
        ),
        (
            "json",
            {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "string", "pattern": "x(y"}}},
            f"{REJECTED}not a regular expression: unclosed group at character 1",
        ),
        ("json", {"properties": {"a": {"uniqueItems": True}}}, f'{REJECTED}Unimplemented keys: ["uniq'),
        ("json", {"$ref": "#/nowhere"}, f"{REJECTED}Pointer '/nowhere' does not exist"),
        ("json", {"type": "integer", "minimum": 2, "maximum": 1}, f"{REJECTED}Unsatisfiable schema: minimum (2) is"),
        ("regex", "ab(c", f"{REJECTED}not a regular expression: unclosed group at character 2"),
        ("regex", "(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
        ("grammar", 'start: "a"\n  b', f"{REJECTED}line 2, column 4: "),
        ("grammar", "root ::= other", f"{REJECTED}Rule 'other' not found"),
        ("grammar", 'root ::= "a"\nb ::= ?', f"{REJECTED}Expected name at line 2"),
        ("grammar", 'root ::= "a"\nb ::= [x', f"{REJECTED}Unexpected end of input at line 2"),
        ("regex", "\ud800", f"{REJECTED}'utf-8' codec can't encode"),
        # Costly constraints: an endless compilation, a first mask that takes seconds, and deeply nested brackets.
        ("json", {"type": "integer", "multipleOf": 1234567}, f"{REJECTED}compilation takes over 1 s of CPU time"),
        ("regex", "((a{100}){100}){100}", REJECTED),
        ("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, REJECTED),
        ("json", json.loads('{"items":' * 300 + "{}" + "}" * 300), "recursion limit"),
    ],
)
def test_a_constraint_that_cannot_be_enforced_is_rejected_with_a_reason(
    checker: GrammarChecker, kind: ConstraintKind, content: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(checker, kind, content)
    assert message in caught.value.message
    assert caught.value.param == "field"
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
    assert checked(checker, "regex", "a+") is not None


def test_lenient_ignores_schema_keywords_that_cannot_be_enforced(checker: GrammarChecker) -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        checked(checker, "json", schema)
    assert checked(checker, "json", schema, lenient=True) is not None


def test_every_kind_of_constraint_becomes_a_grammar(checker: GrammarChecker) -> None:
    kinds: dict[ConstraintKind, Any] = {
        "json": SCHEMA,
        "regex": r"\d{3}",
        "choice": ['é😀\n"\\', "b"],
        "grammar": 'start: "a"+',
    }
    grammars = {checked(checker, kind, content) for kind, content in kinds.items()}
    assert len(grammars) == 4
    assert all(grammars)
    assert asyncio.run(checker.grammar(None)) is None


def test_each_request_is_observed_with_the_compile_time_unless_cached() -> None:
    told: list[tuple[str, str, float | None]] = []
    checker = GrammarChecker(tiny_tokenizer(), observe=lambda *observed: told.append(observed))
    asked: list[tuple[ConstraintKind, Any]] = [("regex", "a"), ("regex", "a"), ("json", {"type": "x"})]
    for kind, content in asked:
        with contextlib.suppress(InvalidRequest):
            checked(checker, kind, content)
    asyncio.run(checker.grammar(None))
    checker.close()
    assert [observed[:2] for observed in told] == [("regex", "accepted"), ("regex", "accepted"), ("json", "refused")]
    assert [seconds is None for _, _, seconds in told] == [False, True, False]


def test_a_killed_compiler_does_not_reject_the_grammar_for_later_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker(tiny_tokenizer())

    def kill(_: object) -> Never:
        raise ProcessKilled

    with monkeypatch.context() as patches:
        patches.setattr(checker._process, "ask", kill)
        with pytest.raises(EngineFailed, match="the grammar compiler process was killed; try again later") as raised:
            checked(checker, "regex", "a")
    assert raised.value.retry
    assert checked(checker, "regex", "a") is not None
    checker.close()


def test_a_request_that_waits_too_long_for_the_compiler_is_rejected() -> None:
    checker = GrammarChecker(tiny_tokenizer(), ProcessLimits(cpu_seconds=1.0, memory_bytes=2**30), wait_seconds=0.01)

    async def ask_two() -> list[Any]:
        slow = OutputConstraint("json", {"type": "integer", "multipleOf": 1234567}, "slow")
        fast = OutputConstraint("regex", "a", "fast")
        return list(await asyncio.gather(checker.grammar(slow), checker.grammar(fast), return_exceptions=True))

    slow, fast = asyncio.run(ask_two())
    checker.close()
    assert isinstance(slow, InvalidRequest)
    assert isinstance(fast, Overloaded)
    assert fast.headers()["retry-after"] == "1"
