"""Parser of completions: reasoning, text and tool calls, for any cut and any truncation of the text."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.chat.output_parser import OutputParser
from model.chat.reasoning import REASONING_FORMATS, begins_in_reasoning
from model.chat.tool_formats.table import TOOL_FORMATS
from model.chat.tool_formats.tool_format import Part, PartKind, ToolFormat, ToolSchema
from tests.model.chat.tool_formats.samples import CUTS, byte_tokens, calls_of, joined, pieces, tools_and_calls, written

THINK = REASONING_FORMATS["think"]
HERMES = TOOL_FORMATS["hermes"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALLED = [Part(PartKind.CALL, "f"), Part(PartKind.ARGUMENTS, '{"a": 1}')]
ANY = ToolSchema(name="f", parameters={"type": "object"}, lenient=False)


def text(value: str) -> Part:
    return Part(PartKind.TEXT, value)


def reasoned(value: str) -> Part:
    return Part(PartKind.REASONING, value)


def parsed(parser: OutputParser, completion: list[str], *, flush: bool = True) -> list[Part]:
    parts = [part for piece in completion for part in parser.push(piece)]
    return joined([*parts, *(parser.flush() if flush else ())])


@pytest.mark.parametrize(
    ("completion", "options", "wanted"),
    [
        ("", {}, []),
        (" a <think>b</think>", {}, [text(" a <think>b</think>")]),
        ("<think>\na\n</think>\n\nb ", {"reasoning": THINK}, [reasoned("a"), text("b ")]),
        (" <think>a</think>b<think>c", {"reasoning": THINK}, [reasoned("a"), text("b<think>c")]),
        ("<think></think>b", {"reasoning": THINK}, [text("b")]),
        ("<think>a </thi", {"reasoning": THINK}, [reasoned("a </thi")]),
        ("<thi", {"reasoning": THINK}, [text("<thi")]),
        (" b", {"reasoning": THINK}, [text(" b")]),
        ("a</think>b", {"reasoning": THINK, "is_reasoning": True}, [reasoned("a"), text("b")]),
        ("<think>b", {"reasoning": THINK, "is_reasoning": False}, [text("<think>b")]),
        (CALL, {"tools": HERMES}, CALLED),
        (f"\n\n{CALL}\n{CALL}", {"tools": HERMES}, [*CALLED, *CALLED]),
        (f"a b \n\n{CALL}", {"tools": HERMES}, [text("a b"), *CALLED]),
        ("a b \n\n<tool", {"tools": HERMES}, [text("a b \n\n<tool")]),
        (" a \n b\n", {"tools": HERMES}, [text(" a \n b\n")]),
        (f"<think>a</think>\n{CALL}", {"reasoning": THINK, "tools": HERMES}, [reasoned("a"), *CALLED]),
        (f"<think>{CALL}</think>b", {"reasoning": THINK, "tools": HERMES}, [reasoned(CALL), text("b")]),
        (CALL, {}, [text(CALL)]),
        (
            '\n{"name": "f", "parameters": {}}',
            {"tools": "llama3_json"},
            [Part(PartKind.CALL, "f"), Part(PartKind.ARGUMENTS, "{}")],
        ),
        ('a {"name": "f"', {"tools": "llama3_json"}, [text('a {"name": "f"')]),
        ("a[0] [f()]", {"tools": "pythonic"}, [text("a[0] [f()]")]),
    ],
)
def test_parts_of_completions(completion: str, options: dict[str, Any], wanted: list[Part]) -> None:
    tools = options.get("tools")
    options = {"reasoning": None, **options, "tools": TOOL_FORMATS[tools] if isinstance(tools, str) else tools}
    for cut in ([completion], list(completion)):
        parser = OutputParser(**options, schemas=[ANY])
        assert parsed(parser, cut) == wanted
        assert parser.num_calls == sum(part.kind is PartKind.CALL for part in wanted)


@pytest.mark.parametrize(
    ("name", "begun", "kind"),
    [
        ("hermes", "a", PartKind.TEXT),
        ("hermes", "<think>a", PartKind.REASONING),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "b', PartKind.ARGUMENTS),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nb", PartKind.ARGUMENTS),
        ("pythonic", '[f(a="b', PartKind.ARGUMENTS),
    ],
)
def test_most_texts_need_no_parsing(name: str, begun: str, kind: PartKind) -> None:
    string = ToolSchema(name="f", parameters={"type": "object", "properties": {"a": {"type": "string"}}}, lenient=False)
    parser = OutputParser(reasoning=THINK, tools=TOOL_FORMATS[name], schemas=[string])
    parser.push(begun)
    for text in (" the", "é😀"):
        assert parser.plain_kind(text) is kind
        assert parser.push(text) == [Part(kind, text)]
    assert parser.plain_kind("") is None


def test_a_prompt_may_end_in_reasoning_or_after_it() -> None:
    assert begins_in_reasoning("assistant\n<think>\n", THINK) is True
    assert begins_in_reasoning("assistant\n<think>\n\n</think>\n\n", THINK) is False
    assert begins_in_reasoning("<think>a</think> assistant\n", THINK) is None


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=25)
@given(
    case=tools_and_calls(),
    lead=st.sampled_from(["", "\n", "Hi", "Well,\n\n"]),
    reasoning=st.sampled_from(["", "<think>\nHm < [ {\n</think>\n\n"]),
    cuts=CUTS,
    length=st.integers(0, 3000),
)
def test_any_cut_gives_the_same_parts_and_a_truncated_completion_a_prefix(
    name: str, case: Any, lead: str, reasoning: str, cuts: list[int], length: int
) -> None:
    form, (tools, calls) = TOOL_FORMATS[name], case
    lead = "" if form.begins_text else lead
    completion = reasoning + lead + form.opening + written(form, calls)

    def parser() -> OutputParser:
        return OutputParser(reasoning=THINK, tools=form, schemas=tools)

    whole = parsed(parser(), [completion])
    assert calls_of(whole) == calls
    lead_parts = [part for part in whole if part.kind in (PartKind.TEXT, PartKind.REASONING)]
    assert lead_parts == [
        *([reasoned("Hm < [ {")] if reasoning else []),
        *([text(lead.strip())] if lead.strip() else []),
    ]
    assert parsed(parser(), pieces(completion, cuts)) == whole
    begun = parser()
    prefix = parsed(begun, pieces(completion[:length], cuts), flush=False)
    assert is_prefix(prefix, whole)
    begun.flush()


def is_prefix(parts: list[Part], whole: list[Part]) -> bool:
    """Return True if parts are the beginning of other parts, of which the last part may go on."""
    if not parts:
        return True
    *before, last = parts
    rest = whole[len(before) :]
    return (
        whole[: len(before)] == before
        and bool(rest)
        and rest[0].kind is last.kind
        and rest[0].text.startswith(last.text)
    )


def fragments(form: ToolFormat) -> st.SearchStrategy[str]:
    """Return a strategy of texts with beginnings of a format's opening."""
    begun = st.integers(0, len(form.opening)).map(lambda length: form.opening[:length])
    return st.lists(st.one_of(begun, st.sampled_from(["a", " ", "\n", "\x1c", "\u3000", "é", "\x0b"])), max_size=5).map(
        "".join
    )


@cache
def free_text_matcher(name: str, has_marks: bool) -> Any:
    return byte_tokens(has_marks=has_marks).matcher(TOOL_FORMATS[name], [ANY], auto=True)


@pytest.mark.parametrize("has_marks", [True, False], ids=["marks", "plain"])
@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=60)
@given(data=st.data())
def test_free_text_is_accepted_unless_the_parser_finds_a_call_in_it(name: str, has_marks: bool, data: Any) -> None:
    form, tokens = TOOL_FORMATS[name], byte_tokens(has_marks=has_marks)
    completion = data.draw(fragments(form))
    parts = parsed(OutputParser(reasoning=None, tools=form, schemas=[ANY]), [completion])
    accepted = tokens.rejected(free_text_matcher(name, has_marks).deep_copy(), completion) is None
    if accepted:
        assert parts == ([text(completion)] if completion else [])
        return
    # A mark that is one token begins a call even without the rest of the opening.
    assert any(begun in completion for begun in (form.opening, *(form.marks if has_marks else ())))


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMATS.items() if form.marks])
def test_a_mark_spelled_with_ordinary_tokens_does_not_begin_a_call(name: str) -> None:
    form, tokens = TOOL_FORMATS[name], byte_tokens(has_marks=True)
    matcher = tokens.matcher(form, [ANY], auto=True)
    spelled = tokens.tokenizer.encode(form.opening)
    assert [matcher.consume_token(token_id) for token_id in spelled] == [True] * (len(spelled) - 1) + [False]
