"""Chat templates: search for the template's file, and rendering that equals that of transformers."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from model.chat.template import PLAIN_SOURCE, ChatTemplate, cut_at_continuation, load_chat_template, mark_continuation
from model.chat.template_sandbox import TemplateFailure, compile_template, render
from model.io.files import CheckpointError
from model.tokenizer.bos_eos import read_tokenizer_config
from tests.model.chat_templates import CONVERSATIONS, TEMPLATES

MARKS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}


def theirs(
    source: str, messages: list[dict[str, Any]], *, add_generation_prompt: bool, continue_final_message: bool = False
) -> str:
    """Render messages with the transformers library, without message keys whose value is None."""
    kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
    rendered = render_jinja_template(
        [kept],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **MARKS,
    )
    (text,), _ = cast(tuple[list[str], Any], rendered)
    return str(text)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_continued_conversation_ends_as_in_transformers(family: str, conversation: str) -> None:
    source = TEMPLATES[family]
    answer = {"role": "assistant", "content": "Sure: CONTINUE_FINAL_MESSAGE_TAG"}
    for messages in (CONVERSATIONS[conversation], [*CONVERSATIONS[conversation], answer]):
        for end in ("", "\n\n", "  {", "<|im_"):
            *others, final = messages
            continued = [*others, {**final, "content": final["content"] + end}]
            ours = partial(continuation, ChatTemplate(source=source, origin="test", special_tokens=MARKS), continued)
            expected = partial(theirs, source, continued, add_generation_prompt=False, continue_final_message=True)
            assert outcome(ours) == outcome(expected)


def continuation(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    return cut_at_continuation(template.render(mark_continuation(messages), add_generation_prompt=False))


def test_a_final_message_without_text_cannot_be_continued() -> None:
    with pytest.raises(TemplateFailure, match="no text to continue"):
        mark_continuation([{"role": "assistant", "content": None}])
    with pytest.raises(TemplateFailure, match="does not write the content"):
        cut_at_continuation("text")


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_renders_as_in_transformers(family: str, conversation: str, add_generation_prompt: bool) -> None:
    source, messages = TEMPLATES[family], CONVERSATIONS[conversation]
    template = ChatTemplate(source=source, origin="test", special_tokens=MARKS)
    expected = outcome(lambda: theirs(source, messages, add_generation_prompt=add_generation_prompt))
    assert expected.strip()
    assert outcome(lambda: template.render(messages, add_generation_prompt=add_generation_prompt)) == expected


def outcome(render: Callable[[], str]) -> str:
    """Return the rendered text, or the error that the template raised."""
    try:
        return render()
    except jinja2.TemplateError as error:
        return f"refused: {error}"
    except TemplateFailure as failure:
        return f"refused: {failure}" if failure.by_template else f"failed: {failure}"


def test_templates_reject_some_conversations_and_render_others() -> None:
    outcomes = {
        outcome(partial(ChatTemplate(source=source, origin="", special_tokens=MARKS).render, messages))[:9]
        for source in TEMPLATES.values()
        for messages in CONVERSATIONS.values()
    }
    assert "refused: " in outcomes
    assert len(outcomes) > 5


def test_gemma_3_begins_the_first_user_turn_with_the_system_message() -> None:
    template = ChatTemplate(source=TEMPLATES["gemma-3"], origin="", special_tokens={"bos_token": "<bos>"})
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    assert template.render(turns) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )


def test_the_plain_template_writes_the_texts_and_no_roles() -> None:
    template = ChatTemplate(source=PLAIN_SOURCE, origin="plain")
    messages = [{"role": "system", "content": "Once"}, {"role": "user", "content": "upon"}]
    assert template.render(messages) == "Once\n\nupon"
    marked = ChatTemplate(source=PLAIN_SOURCE, origin="plain", special_tokens=MARKS)
    assert marked.render(messages[:1]) == "<s>Once"


def write(directory: Path, **files: Any) -> Path:
    for name, value in files.items():
        path = directory / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return directory


CONFIG, FILE, OLD = "tokenizer_config_DOT_json", "chat_template_DOT_jinja", "chat_template_DOT_json"


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ({}, None),
        ({CONFIG: {"model_max_length": 5}}, None),
        ({CONFIG: {"chat_template": "a"}}, "a"),
        (
            {CONFIG: {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}},
            "d",
        ),
        ({CONFIG: {"chat_template": "a"}, FILE: "b"}, "b"),
        ({CONFIG: {"chat_template": "a"}, OLD: {"chat_template": "c"}}, "a"),
        ({OLD: {"chat_template": "c"}}, "c"),
        ({FILE: "b", "additional_chat_templates__rag_DOT_jinja": "r"}, "b"),
    ],
)
def test_templates_are_found_in_every_supported_place(
    tmp_path: Path, files: dict[str, Any], source: str | None
) -> None:
    found = load_chat_template(write(tmp_path, **files))
    assert (None if found is None else found.source) == source


def test_unused_templates_are_listed(tmp_path: Path) -> None:
    write(tmp_path, **{FILE: "b", "additional_chat_templates__rag_DOT_jinja": "r"})
    found = load_chat_template(tmp_path)
    assert found is not None
    assert found.unused == ("rag",)
    assert found.origin == str(tmp_path / "chat_template.jinja")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({CONFIG: "{"}, "tokenizer_config.json: not JSON"),
        ({CONFIG: "[1]"}, "tokenizer_config.json: a JSON object expected"),
        ({CONFIG: {"chat_template": 7}}, "chat_template must be a string or a list"),
        ({CONFIG: {"chat_template": [{"name": "a"}]}}, "chat_template must be a string or a list"),
        ({CONFIG: {"chat_template": [{"name": "rag", "template": "r"}]}}, "templates rag, but no template default"),
    ],
)
def test_an_unreadable_template_gives_one_error_line(tmp_path: Path, files: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_chat_template(write(tmp_path, **files))
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_special_tokens_are_read_as_strings_or_objects(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "add_bos_token": True, "x": "y"}
    write(
        tmp_path,
        **{CONFIG: config, "special_tokens_map_DOT_json": {"eos_token": "other", "pad_token": {"content": "<pad>"}}},
    )
    assert read_tokenizer_config(tmp_path).roles == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "forbids"),
        ("{{ messages[0].update(role='system') }}", "forbids"),
        ("{{ (''|attr('__class__')) ~ cycler.__init__.__globals__.os.popen('id') }}", "forbids"),
        ("{{ strftime_now.__globals__['sys'] }}", "forbids"),
        ("{{ raise_exception.__globals__.sys }}", "forbids"),
        ("{{ namespace(__class__=1) }}", "forbids"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "forbids"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% include 'passwd' %}", "no loader"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0].content.nothing.more }}", "UndefinedError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 'x' * 2000 }}", "the rendered text is over 1000 characters"),
        ("{% for i in range(99) %}{{ 'x' * 99 }}{% endfor %}", "the rendered text is over 1000 characters"),
        ("{{ raise_exception('a\nb' ~ 'c' * 999) }}", "a b"),
    ],
)
def test_a_forbidden_template_operation_gives_one_error_line(source: str, said: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(TemplateFailure) as caught:
        render(compile_template(source), {"messages": messages}, max_characters=1000)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 300
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(1) }}"])
def test_forbidden_attributes_render_as_empty_text(source: str) -> None:
    assert render(compile_template(source), {}, max_characters=1000) == ""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% if %}", "line 1: Expected an expression"),
        ("\n\n{% endfor %}", "line 3: Encountered unknown tag 'endfor'"),
        ("{{ a | no_such_filter }}", "line 1: No filter named 'no_such_filter'"),
        ("{% generation %}", "line 1: Unexpected end of template"),
        ("{{ " + "(" * 5000, "the template cannot be compiled: RecursionError"),
    ],
)
def test_an_invalid_template_gives_one_error_line(source: str, said: str) -> None:
    with pytest.raises(TemplateFailure) as caught:
        compile_template(source)
    assert said in str(caught.value)
